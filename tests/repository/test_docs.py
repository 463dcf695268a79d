"""The pages: built without a warning, with the tables that the code gives, and every block of code in them is run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import commands, page_code
from support.otlp_http_receiver import Receiver
from support.prometheus_server import binary

import torchotel.testing
from torchotel._handle import Handle
from torchotel.cli.demo import JAEGER_VERSION
from torchotel.stack.paths import JAEGER

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
DEPLOY = sorted((ROOT / "deploy").rglob("README.md"))
NOT_RUN = {
    "installs packages",
    "needs Docker",
    "runs until it is stopped",
    "takes minutes",
    "run by tests/repository/test_examples.py",
    "names a script of the reader's",
}
"""The reasons why a block is not run here; each stands above the block."""
SHOWN_ONLY = {"text", "yaml"}
NOT_PUBLIC = {"reconfigure", "disable_after_fork", "end", "session"}
"""Methods of the handle that only torchotel calls."""


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.program
@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_runs(page: Path, server: Receiver, tmp_path: Path) -> None:
    """A reader who types in all blocks of a page sees none fail, and what he trains arrives."""
    pytest.importorskip("sklearn")
    endpoint = server.url.removesuffix("/v1/traces")
    done = commands.forked_python(page_code.__file__, str(page), cwd=tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT=endpoint)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    trains = any(".backward()" in block and "capture(" not in block for block in page_code.blocks(page))
    assert trains == any(span.name == "torch.step" for span in server.spans)


@pytest.mark.program
@pytest.mark.parametrize("page", PAGES, ids=name)
def test_what_is_not_run_says_why(page: Path) -> None:
    """Only for reasons that are listed here; no block is left out by its language."""
    assert {reason for _, reason in page_code.not_run(page)} <= NOT_RUN
    assert page_code.languages(page) <= {"python", "sh", *SHOWN_ONLY}


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=name)
def test_tables_are_those_of_the_code(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make docs` would change nothing."""
    monkeypatch.syspath_prepend(str(DOCS))
    from tables import filled  # noqa: PLC0415  # a script beside the pages

    text = page.read_text(encoding="utf-8")
    assert filled(text) == text


def test_pages_are_short() -> None:
    """Of the README 700 words, of a page 2,000, code and tables counted; measurements are as long as their tables."""
    limits = {ROOT / "README.md": 700, DOCS / "overhead.md": None, DOCS / "fidelity.md": None}
    words = {page: len(page.read_text(encoding="utf-8").split()) for page in [*PAGES, *DEPLOY]}
    over = {name(page): count for page, count in words.items() if count > (limits.get(page, 2000) or count)}
    assert over == {}


def test_every_example_is_on_the_page_of_examples() -> None:
    page = (DOCS / "examples.md").read_text(encoding="utf-8")
    assert [path.name for path in sorted((ROOT / "examples").glob("*.py")) if path.name not in page] == []


@pytest.mark.program
def test_the_site_is_whole(tmp_path: Path) -> None:
    """No link is broken, no public name is missing, and no page loads anything from elsewhere."""
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, env=commands.environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    built = sorted((tmp_path / "site").rglob("*.html"))
    examples = (tmp_path / "site" / "examples" / "index.html").read_text(encoding="utf-8")
    assert examples.count("__main__") == 5, "the programs stand on their page whole"
    assert {"index.html", "spans", "metrics", "configuration"} <= {path.name for path in (tmp_path / "site").iterdir()}
    assert all((tmp_path / "site" / page.relative_to(ROOT).with_name("index.html")).is_file() for page in DEPLOY)
    api = (tmp_path / "site" / "api" / "index.html").read_text(encoding="utf-8")
    public = {*torchotel.__all__, *(f"testing.{one}" for one in torchotel.testing.__all__)}
    assert [one for one in sorted(public) if f'id="torchotel.{one}"' not in api] == []
    handle = {one for one in vars(Handle) if not one.startswith("_")} - NOT_PUBLIC
    assert [one for one in sorted(handle) if f'id="torchotel._handle.Handle.{one}"' not in api] == []
    source, sheet = r"<(?:script|img|iframe)[^>]*\ssrc", r"<link[^>]*rel=\"?(?:stylesheet|pre)[^>]*\shref"
    loading = re.compile(rf"(?:{source}|{sheet})=\"?https?:[^>]*>")
    assert [found for path in built for found in loading.findall(path.read_text(encoding="utf-8"))] == []


@pytest.mark.real_server
def test_prometheus_takes_the_files_of_the_pages(tmp_path: Path) -> None:
    promtool = binary("promtool")
    if promtool is None:
        pytest.skip("there is no promtool, neither built nor on the path")
    titled = re.compile(r'```yaml title="prometheus.yml"\n(.*?)```', re.DOTALL)
    files = [text for page in PAGES for text in titled.findall(page.read_text(encoding="utf-8"))]
    assert files
    for text in files:
        (tmp_path / "prometheus.yml").write_text(text)
        words = [promtool, "check", "config", str(tmp_path / "prometheus.yml")]
        done = subprocess.run(words, capture_output=True, check=False)
        assert done.returncode == 0, done.stdout


def test_pages_name_the_jaeger_that_is_tested() -> None:
    images = [image for page in PAGES for image in re.findall(r"jaegertracing/jaeger:([\d.]+)", page.read_text())]
    assert {*images, JAEGER_VERSION} == {JAEGER.version}
