"""Every search that a page shows finds in a real Jaeger what the page says, and nothing else."""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median

import pytest
from support import digits_training
from support.backend_servers import jaeger, own_ports, running
from support.jaeger_traces import STORES, JaegerApi, Said, recorded

import torchotel

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("deploy/**/README.md")), *sorted(ROOT.glob("docs/*.md"))]
SEARCH = re.compile(r"`((?:torch|error)[\w.]*)=([^`]+)`")
"""A tag with a value in backticks, wherever it stands."""
SERVICE = "digits"


class Trained:
    """What a training is known to have done, by ids of traces."""

    def __init__(self, spans: Iterable[Said]) -> None:
        self.spans = list(spans)
        roots = sorted((said for said in self.spans if not said.parent_id), key=lambda said: int(said.start_ns))
        self._steps = [root for root in roots if root.name == "torch.step"]
        self.steps = [root.trace_id for root in self._steps]
        self.evaluation = next(root.trace_id for root in roots if root.name == "torch.evaluation")

    def slow(self) -> set[str]:
        """Give the step that is slow on purpose, and those that were for reasons of this machine's."""
        others = (step for step in self._steps if step.attributes.get("torch.kept.reason") == {"stringValue": "slow"})
        return {self.steps[digits_training.SLOW], *(step.trace_id for step in others if self._took_longer(step))}

    def _took_longer(self, step: Said) -> bool:
        """Tell whether a step took half again as long as those before it, with detail or without as it was."""
        detailed = {said.trace_id for said in self.spans if "torch.direction" in said.attributes}
        like = [one for one in self._steps if (one.trace_id in detailed) == (step.trace_id in detailed)]
        return _duration_ns(step) > 1.5 * median(_duration_ns(one) for one in like[: like.index(step)])


Searched = tuple[JaegerApi, Trained]
FINDS: dict[str, Callable[[Trained], set[str]]] = {
    "torch.step.number=3": lambda run: {run.steps[3]},
    "torch.step.number=12": lambda run: {run.steps[12]},
    "torch.kept.reason=first": lambda run: set(run.steps[:10]),
    "torch.kept.reason=nan": lambda run: {run.steps[digits_training.NAN]},
    "torch.kept.reason=error": lambda run: {run.steps[digits_training.FAILED], run.evaluation},
    "torch.kept.reason=slow": Trained.slow,
    "error.type=ValueError": lambda run: {run.evaluation},
    "torch.module.path=fc": lambda run: {said.trace_id for said in run.spans if said.name.endswith("ward fc")},
}


def _duration_ns(said: Said) -> int:
    return int(said.end_ns) - int(said.start_ns)


@pytest.fixture(scope="module", params=STORES)
def searched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Searched]:
    """Train with the settings that nobody chose, and give Jaeger and what there is to find."""
    folder, ports = tmp_path_factory.mktemp("searched"), own_ports()
    with running(jaeger(folder / "jaeger", ports, memory=request.param == "memory")):
        handle = torchotel.instrument(
            service_name=SERVICE,
            endpoint=f"http://127.0.0.1:{ports.jaeger_otlp_http}",
            record=folder / "run",
            metrics_exporter="none",
        )
        digits_training.train_all()
        handle.shutdown()
        yield JaegerApi(ports.jaeger), Trained(recorded(folder / "run").values())


def test_the_searches_of_the_pages_are_those_that_are_tried() -> None:
    found = {"=".join(search) for page in PAGES for search in SEARCH.findall(page.read_text(encoding="utf-8"))}
    assert found == FINDS.keys()


@pytest.mark.real_server
@pytest.mark.parametrize("search", FINDS)
def test_a_search_finds_what_it_says(search: str, searched: Searched) -> None:
    api, trained = searched
    key, value = search.split("=")
    expected = FINDS[search](trained)
    assert expected
    assert api.search(SERVICE, **{key: value}) == expected
