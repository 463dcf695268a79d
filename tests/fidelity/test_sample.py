"""Some of each kind; `make fidelity` checks all."""

from collections import Counter

import pytest

from fidelity import forward_subjects, layer_subjects, norm_subjects
from fidelity.checked import check
from fidelity.subjects import Subject
from fidelity.truth import measure_undisturbed

pytestmark = pytest.mark.filterwarnings("ignore")  # the models' own
every = pytest.importorskip("fidelity.all_subjects", reason="torchvision or transformers is missing")

SAMPLE = {
    "googlenet": "in-place ReLUs, concatenations, three outputs",
    "swin_t": "windows, shifted views, stochastic depth",
    "wide_resnet50_2": "too large for numbers",
    "lraspp_mobilenet_v3_large": "a mapping as output",
    "AlbertForMaskedLM": "one layer that is called twice",
    "FNetForMaskedLM": "complex numbers",
    "GptOssForCausalLM": "a mixture of experts in one parameter",
    "MambaForCausalLM": "a state space",
    "RwkvForCausalLM": "a function with a backward of its own",
    "T5ForConditionalGeneration": "an encoder and a decoder with weights in common",
    "SwitchTransformersForConditionalGeneration": "a mixture of experts in modules",
    "DetrForObjectDetection": "a backbone, learnt queries",
    "Wav2Vec2ForCTC": "sound, a parametrization",
    "PerceiverForMaskedLM": "latents",
    "GPT2LMHeadModel, checkpointed, reentrant True": "recomputation, with runs of the engine inside another",
}
SMALL = [*layer_subjects.subjects(), *forward_subjects.subjects(), *norm_subjects.subjects()]
CHOSEN = [one for one in every.subjects() if one.name in SAMPLE and not one.kind.endswith("quantizable")]


def test_the_sample_is_there() -> None:
    """Every name of the sample is a subject's."""
    assert {subject.name for subject in CHOSEN} == SAMPLE.keys()


def test_no_two_subjects_go_by_the_same_name() -> None:
    """The table's lines are found by kind and name."""
    keys = Counter((subject.kind, subject.name) for subject in every.subjects())
    assert [key for key, count in keys.items() if count > 1] == []


@pytest.mark.parametrize("subject", [*CHOSEN, *SMALL], ids=lambda subject: f"{subject.kind}: {subject.name}")
def test_nothing_is_changed_and_the_trace_is_right(subject: Subject) -> None:
    """Every number is what it was, bit for bit, every call has its spans in their places, and norms are true."""
    row = check(subject)
    assert row.repeats
    assert row.changed == []
    assert row.faults == []
    assert row.norms is None or row.norms.faults == []
    assert row.calls >= subject.steps
    assert row.spans > row.calls


def test_times_of_spans_are_true() -> None:
    """Leaves take what hooks inside of ours see: within a two-hundredth, or two microseconds for each end."""
    (subject,) = [subject for subject in CHOSEN if subject.name == "googlenet"]
    truth = measure_undisturbed(subject)
    for errors in truth:
        assert errors is not None
        assert len(errors.leaves) > 100
    assert truth.faults(alone=False) == []
