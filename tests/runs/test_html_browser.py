"""Test the page in a real Chromium without a network."""

import html
import itertools
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from plotly.offline import get_plotlyjs
from support import browser, report_runs

from torchotel.runs.html import document

pytestmark = pytest.mark.real_server

in_chromium = pytest.mark.skipif(browser.BINARY is None, reason=browser.SKIPPED)

MARKS = {
    "steps": ['class="point"', 'class="js-line"'],
    "modules": ['class="slice'],
    "norms": ["<image"],
    "timeline": ['class="point"'],
    "logged": ['class="js-line"'],
}
"""Classes of the elements that plotly draws: bars, lines, sectors, pixels."""

HOSTILE = [
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    '"><svg onload=alert(1)><a href="https://example.com">x</a>',
    '<a href="javascript:alert(1)">x</a><b>bold</b>',
    "%{customdata[0]} ${title} $$x^2$$ &lt;i&gt;",
    "\u202egnp.exe \u2066\u0000\u0007\n\r\t\u2028",
    "half a character \ud800, 漢字 🙂 é",
    "long " * 20_000,
    "a." * 5_000,
    "__proto__",
    "",
]


@pytest.fixture(scope="module")
def harmless(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return the elements of a page with harmless names."""
    run = report_runs.training(
        tmp_path_factory.mktemp("harmless") / "run", error={"type": "x", "message": "x"}, nonfinite=["x"]
    )
    return elements(document(report_runs.content(run)))


def _open(folder: Path, tmp_path: Path, *flags: str) -> browser.Opened:
    page = tmp_path / "page.html"
    page.write_text(document(report_runs.content(folder)), encoding="utf-8")
    return browser.open_page(page, tmp_path / "profile", *flags)


@in_chromium
def test_draws_every_figure_and_complains_of_nothing(tmp_path: Path) -> None:
    opened = _open(report_runs.training(tmp_path / "run"), tmp_path)
    assert opened.console == []
    assert "data-drawn-ms=" in opened.dom
    for name, marks in MARKS.items():
        section = opened.section(name)
        assert [mark for mark in marks if mark not in section] == [], name
    assert len(re.findall('class="slice[ "]', opened.section("modules"))) == 2 * 7  # six layers and a container
    assert all(f">{name}</" in opened.section("timeline") for name in ("conv", "forward", "optimizer.step"))


@in_chromium
def test_draws_a_run_of_one_step_and_one_of_none(tmp_path: Path) -> None:
    one = _open(report_runs.training(tmp_path / "one", steps=1), tmp_path)
    none = _open(report_runs.training(tmp_path / "none", steps=0), tmp_path)
    assert (one.console, none.console) == ([], [])
    assert all(mark in one.section("modules") for mark in MARKS["modules"])
    assert "no training step" in none.section("glance")
    assert 'class="figure' not in none.dom


@in_chromium
def test_leaves_a_strangers_names_without_effect(tmp_path: Path) -> None:
    """Every name of a run appears as text of at most one line, whatever characters it has."""
    evils = itertools.cycle(HOSTILE)
    known: dict[str, str] = {}
    evil = "".join(HOSTILE)
    folder = report_runs.training(
        tmp_path / "run",
        rename=lambda name: known.setdefault(name, f"{name}{next(evils)}"),
        info={"run_id": evil, "resource": {"host.name": evil, "torch.version": evil, "torch.rank": evil}},
        error={"type": evil, "message": evil},
        nonfinite=[f"gradient {evil}"],
    )
    opened = _open(folder, tmp_path)
    assert len(known) > len(HOSTILE)
    assert opened.console == []
    assert "data-drawn-ms=" in opened.dom
    assert "<title>owned" not in opened.dom
    assert elements(opened.dom) <= elements(_open(report_runs.training(tmp_path / "benign"), tmp_path).dom)


@pytest.mark.parametrize("evil", HOSTILE, ids=range(len(HOSTILE)))
def test_escapes_and_cuts_each_name_in_each_place(tmp_path: Path, evil: str, harmless: set[str]) -> None:
    """The written page has no element that a harmless run's page does not have."""
    folder = report_runs.training(
        tmp_path / "run",
        rename=lambda name: evil if name in {"train", "Net", "accuracy"} else f"{name}{evil}",
        info={"run_id": evil, "resource": {"host.name": evil, "torch.version": evil, "torch.rank": evil}},
        error={"type": evil, "message": evil},
        nonfinite=[f"gradient {evil}"],
    )
    written = document(report_runs.content(folder))
    assert elements(written) <= harmless
    assert len(written.encode()) < len(get_plotlyjs()) / 2 + 300_000


@in_chromium
@pytest.mark.parametrize("width", [1400, 500])
def test_modules_have_their_names_on_a_wide_and_on_a_narrow_page(tmp_path: Path, width: int) -> None:
    """Labels of the second level of modules are visible at every width; plotly hides labels that do not fit."""
    opened = _open(report_runs.training(tmp_path / "run"), tmp_path, f"--window-size={width},3000")
    assert ('class="modebar-btn"' in opened.dom) == (width > 700)  # the buttons would cover the legend
    labels = [html.unescape(label) for label in _labels(opened.section("modules"))]
    second = ["Conv" if width > 700 else "", "", "Head" if width > 700 else ""]
    for name, kind in zip(("conv", "blocks", "head"), second, strict=True):
        assert len([label for label in labels if label.startswith(f"{name}  {kind}")]) == 2, (name, labels)


@in_chromium
def test_is_dark_where_the_reader_prefers_that(tmp_path: Path) -> None:
    """Figures are dark too, although their colours are in their data."""
    folder = report_runs.training(tmp_path / "run")
    light, dark = _open(folder, tmp_path), _open(folder, tmp_path, "--blink-settings=preferredColorScheme=0")
    assert dark.console == []
    ink, ink_in_the_dark = "fill: rgb(31, 41, 51)", "fill: rgb(228, 231, 235)"
    for name in ("steps", "modules", "norms", "timeline", "logged"):
        assert (ink in light.section(name), ink_in_the_dark in light.section(name)) == (True, False), name
        assert (ink in dark.section(name), ink_in_the_dark in dark.section(name)) == (False, True), name


@in_chromium
def test_brightens_faint_modules_in_the_dark(tmp_path: Path) -> None:
    opened = _open(report_runs.training(tmp_path / "run"), tmp_path, "--blink-settings=preferredColorScheme=0")
    slices = re.findall(r'class="surface"[^>]*fill-opacity: ([\d.]+)', opened.section("modules"))
    assert len(slices) == 2 * 7
    assert min(map(float, slices)) > 0.4


@in_chromium
def test_titles_of_figures_fit_a_narrow_page(tmp_path: Path) -> None:
    """On a narrow page, plots of logged values are stacked, and the title of the slowest step has two lines."""
    folder = report_runs.training(tmp_path / "run", 31, duration_s=lambda number: 4.0 if number == 20 else 0.1)
    wide, narrow = (_open(folder, tmp_path, f"--window-size={width},3000") for width in (1400, 500))
    assert (wide.console, narrow.console) == ([], [])
    assert len(_places(wide.section("logged"))) == 3
    assert len(_places(narrow.section("logged"))) == 1
    title = "Slowest step: step 20, 4.000 s, 40 times the median (its{}modules were not recorded)"
    assert title.format(" ") in html.unescape(wide.section("timeline"))
    assert title.format("<br>") in html.unescape(narrow.section("timeline"))


def _places(section: str) -> set[int]:
    """Return the horizontal positions of the titles, in pixels."""
    places = re.findall(r'class="annotation-text-g" transform="rotate\(0,([\d.]+),', section)
    return {round(float(place)) for place in places}


@in_chromium
def test_sorts_a_table_by_a_click_on_its_head(tmp_path: Path) -> None:
    """The first click sorts from the largest value, the second from the smallest; long names break after a dot."""
    run = report_runs.content(report_runs.training(tmp_path / "run"))
    policy = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
    written = policy.sub("", document(run))
    first = {}
    for place, clicks in ((4, 1), (4, 2), (0, 1), (0, 2)):
        click = f"document.querySelectorAll('.sortable th')[{place}].firstChild.click();" * clicks
        page = tmp_path / "page.html"
        page.write_text(written.replace("</body>", f"<script>{click}</script></body>"), encoding="utf-8")
        table = browser.open_page(page, tmp_path / "profile").section("modules").partition("<tbody>")[2]
        first[place, clicks] = table[: table.index("</td>")].removeprefix("<tr><td>")
    assert first == {(4, 1): "Net", (4, 2): "head", (0, 1): "Net", (0, 2): "blocks.<wbr>0"}


def test_shows_program_machine_and_settings(tmp_path: Path) -> None:
    info = {"resource": {"host.name": "node-7", "torch.version": "2.15"}, "config": {"detail": "auto"}}
    written = document(report_runs.content(report_runs.training(tmp_path / "run", info=info)))
    for name, value in (("program", "train"), ("host", "node-7"), ("torch", "2.15"), ("detail", "auto")):
        assert f"<tr><td>{name}</td><td>{value}</td></tr>" in written


def _labels(section: str) -> list[str]:
    """Return the labels of an icicle that are visible."""
    found = re.findall(r'<text [^>]*class="slicetext"([^>]*)>(.*?)</text>', section)
    return [re.sub(r"<[^>]+>", "", text) for attributes, text in found if "display: none" not in attributes]


@in_chromium
def test_shows_names_as_they_are(tmp_path: Path) -> None:
    name = '<b>&"quoted"</b>'
    opened = _open(report_runs.training(tmp_path / "run", rename=lambda old: f"{old}{name}"), tmp_path)
    text = html.unescape(re.sub(r"<[^>]+>", "", re.sub(r"(?s)<script.*?</script>", "", opened.dom)))
    for shown in (f"train{name}", f"conv{name}", f"accuracy{name}"):
        assert shown in text


def elements(page: str) -> set[str]:
    """Return the elements of a page, with the attributes that can run or load something."""
    found = set()

    class Parser(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.add(tag)
            found.update(f"{tag} {name}={value}" for name, value in attrs if name.startswith("on"))
            found.update(f"{tag} {name}={value}" for name, value in attrs if name in {"href", "src", "xlink:href"})

    Parser().feed(re.sub(r"data:image/png[^\"]*", "", page))
    return found
