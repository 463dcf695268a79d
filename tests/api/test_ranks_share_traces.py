"""The steps of all ranks of a training are in one trace, whatever else each rank does."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import PROGRAMS, commands
from support.needs import needs_group_hooks
from support.ranks import run_ranks

from torchotel.runs import open_run
from torchotel.runs.reader import RecordLine, SpanLine

pytestmark = pytest.mark.program

PROGRAM = PROGRAMS / "rank_steps_program.py"
STEPS = 48


class Rank:
    """What one rank recorded."""

    def __init__(self, folder: Path) -> None:
        run = open_run(folder)
        self.steps = [line for line in run.records() if line.kind == "step"]
        self.spans = list(run.spans())
        self.info = run.info

    @property
    def traces(self) -> dict[tuple[int, int], str]:
        """The traces of the steps, by alignment."""
        return {step.alignment: step.trace_id for step in self.steps if step.alignment is not None}

    @property
    def detailed(self) -> list[RecordLine]:
        """The detailed steps."""
        return [step for step in self.steps if step.detailed]

    def collectives(self) -> Iterator[SpanLine]:
        """Return the spans of collectives."""
        return (span for span in self.spans if span.name.startswith("torch.collective "))


def trained(folder: Path, way: str, ranks: int = 2, **variables: str) -> list[Rank]:
    """Train on several ranks, and read what each recorded."""
    folder.mkdir(exist_ok=True)
    errors = run_ranks(str(PROGRAM), way, ranks=ranks, cwd=folder, **{**commands.SILENT, **variables})
    assert "internal error" not in errors
    return [Rank(folder / "run" / f"rank{rank}") for rank in range(ranks)]


def assert_steps_share_traces(ranks: list[Rank]) -> None:
    """Assert that each step has one trace, and that all ranks record the same trace for it."""
    first = ranks[0].traces
    assert len(first) == len(set(first.values())) == STEPS
    assert all(rank.traces == first for rank in ranks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, of which one evaluates more."""
    folder = tmp_path_factory.mktemp("ranks")
    trained(folder, "evaluations", TORCHOTEL_RUN_ID="mine")
    return folder


def ranks_in(folder: Path) -> list[Rank]:
    return [Rank(path) for path in sorted(folder.glob("run/rank?"))]


def test_a_rank_that_evaluates_more(folder: Path) -> None:
    """Traces, the root of each rank, and the ids that the program asks for in a forward."""
    ranks = ranks_in(folder)
    assert_steps_share_traces(ranks)
    for number, rank in enumerate(ranks):
        roots = {span.name for span in rank.spans if span.trace_id in set(rank.traces.values()) and not span.parent_id}
        assert roots == {f"torch.step rank {number}"}
        asked = json.loads((folder / f"asked-{number}.json").read_text())
        assert asked == [step.trace_id for step in rank.steps if step.number % 4 == 3]


def test_detail_is_on_the_same_steps(folder: Path) -> None:
    """About one in two steps has it."""
    first, second = ([step.alignment for step in rank.detailed] for rank in ranks_in(folder))
    assert first == second
    assert STEPS // 4 < len(first) < 3 * STEPS // 4


@needs_group_hooks
def test_collectives(folder: Path) -> None:
    """The ranks have the same ones, with the same numbers, inside the spans that they ran in."""
    ranks = ranks_in(folder)
    of_ranks = []
    for rank in ranks:
        spans = {span.span_id: span for span in rank.spans}
        found = list(rank.collectives())
        parents = [spans[span.parent_id] for span in found]
        assert all(
            parent.start_ns <= span.start_ns <= span.end_ns <= parent.end_ns
            for span, parent in zip(found, parents, strict=True)
        )
        assert {span.name for span in found if spans[span.parent_id].name == "torch.backward"} == {
            "torch.collective all_reduce"
        }
        of_ranks.append(
            [
                (
                    span.trace_id,
                    span.name,
                    span.attributes["torch.collective.sequence"],
                    span.attributes["torch.collective.bytes"],
                )
                for span in found
            ]
        )
        assert {span.trace_id for span in found} == {step.trace_id for step in rank.detailed}
        assert not any("torch.collective.end" in span.attributes for span in found)
        overlaps = {span.attributes.get("torch.collective.overlap.ratio") for span in rank.spans}
        assert overlaps == {None, 0.0}  # the one bucket is reduced by the last layer of the backward
        assert all(step.collectives and step.waits.keys() <= step.phases.keys() for step in rank.steps)
    assert of_ranks[0] == of_ranks[1]
    # Of the model: 8 · 8 + 8 + 8 · 4 + 4 elements of 4 bytes, in one bucket.
    assert {size for _, name, _, size in of_ranks[0] if name.endswith("all_reduce")} == {4 * (8 * 8 + 8 + 8 * 4 + 4)}


@needs_group_hooks
def test_sends_between_two_of_three_ranks(tmp_path: Path) -> None:
    """Gloo counts them as collectives of the group, of which the third rank knows nothing."""
    assert_steps_share_traces(trained(tmp_path, "pairs", 3))


def test_a_companion_that_is_stopped_blocks_no_rank(tmp_path: Path) -> None:
    """The training ends while the companion is stopped; then the companion continues, and records all steps."""
    assert_steps_share_traces(trained(tmp_path, "stopped companion"))


@needs_group_hooks
def test_collectives_of_another_group_only(tmp_path: Path) -> None:
    ranks = trained(tmp_path, "mesh")
    assert_steps_share_traces(ranks)
    assert {span.attributes["torch.collective.group"] for rank in ranks for span in rank.collectives()} == {"all of us"}


def test_two_launches_with_one_run_id(folder: Path, tmp_path: Path) -> None:
    """Many programs have a constant run id; the steps of two launches stay apart."""
    launches = ranks_in(folder), trained(tmp_path, "evaluations", TORCHOTEL_RUN_ID="mine")
    assert {rank.info["run_id"] for launch in launches for rank in launch} == {"mine"}
    one, two = (set(launch[0].traces.values()) for launch in launches)
    assert not one & two


def test_a_restart(tmp_path: Path) -> None:
    """A restart has the same run id and the next generation, and its steps share no trace with the first generation.

    The last step of a rank that ended without a shutdown is in the trace of the other rank's step.
    """
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    done = commands.python(*words, str(PROGRAM), "restart", cwd=tmp_path, OMP_NUM_THREADS="1", **commands.SILENT)
    assert done.returncode == 0, done.stderr
    ranks = [Rank(tmp_path / "run" / f"rank{rank}") for rank in range(2)]
    assert len(ranks[1].traces) == 9
    assert ranks[1].traces.items() <= ranks[0].traces.items()
    again = [Rank(folder) for folder in sorted(tmp_path.glob("run-2/rank?"))]
    identities = [(rank.info["run_id"], rank.info["resource"]["torch.run.generation"]) for rank in [*ranks, *again]]
    run_id = identities[0][0]
    assert identities == [(run_id, 0)] * 2 + [(run_id, 1)] * 2
    assert_steps_share_traces(again)
    assert not set(ranks[0].traces.values()) & set(again[0].traces.values())


def test_the_programs_own_provider(tmp_path: Path) -> None:
    """The spans go through its tracer, which has the generator of the SDK."""
    ranks = trained(tmp_path, "provider", OTEL_TRACES_EXPORTER="otlp")
    assert_steps_share_traces(ranks)
