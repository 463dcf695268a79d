"""Generation with transformers: a request is one trace that opens, its first token whole, the others to be counted."""

import threading
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from opentelemetry.sdk.trace import TracerProvider
from support.both_exports import ENGINES, looked
from support.fastapi_server import served
from torch import nn

from torchotel.testing import CapturedSpan, capture

transformers = pytest.importorskip("transformers", reason="transformers is missing")
tokenizers = pytest.importorskip("tokenizers", reason="transformers is missing")
TRACER = TracerProvider().get_tracer("test")
PROMPT = torch.arange(3, 11).unsqueeze(0)
TOKENS = 64
SMALL: dict[str, Any] = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}


def llama() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **sizes)).eval()


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SMALL, n_embd=32, n_layer=2, n_head=4)).eval()


def count_calls(model: nn.Module) -> list[int]:
    """Count the calls of each forward by hooks of the program's own, one number for each."""
    calls: list[int] = []

    def called(module: nn.Module, *_: object) -> None:
        if module is model:
            calls.append(1)
        else:
            calls[-1] += 1

    for module in model.modules():
        module.register_forward_pre_hook(called)
    return calls


def generate(model: Any, **settings: Any) -> Any:
    return model.generate(PROMPT, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, **settings)


def n_spans(spans: list[CapturedSpan]) -> list[int]:
    """Count the spans of each evaluation, itself left out."""
    return [len(list(span.walk())) - 1 for span in spans]


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("way", [{}, {"use_cache": False}, {"num_beams": 3}], ids=["cached", "not cached", "beams"])
def test_a_request_that_generates_is_one_trace(make: Callable[[], Any], way: dict[str, Any]) -> None:
    """Ten forwards as they are, each with a span for each module called, and one for the rest with number and time."""
    model = make()
    calls = count_calls(model)
    with capture() as captured, TRACER.start_as_current_span("request") as request:
        generate(model, **way)
    *shown, folded = captured.evaluations
    assert {one.trace_id for one in captured.evaluations} == {request.get_span_context().trace_id}
    assert n_spans(shown) == calls[:10]
    assert n_spans([folded]) == [0]
    assert folded.attributes["torch.folded.evaluations"] == len(calls) - 10 == TOKENS - 10
    assert 0 < float(str(folded.attributes["torch.folded.time"])) <= folded.duration_s
    assert shown[-1].end_ns <= folded.start_ns


def test_the_first_token_can_be_told_from_the_others() -> None:
    """It takes the whole prompt, and with a cache the others one token each."""
    model = llama()
    with capture() as captured, TRACER.start_as_current_span("request"):
        generate(model)
    embedded = [one.find("forward model.embed_tokens") for one in captured.evaluations[:-1]]
    shapes = [one.attributes["torch.input.shapes"] for one in embedded]
    assert shapes == [("1x8",)] + [("1x1",)] * 9


def test_the_trace_of_a_long_request_still_opens() -> None:
    """All its evaluations together have `max_spans`; those without layers say how many calls they had."""
    model = llama()
    calls = count_calls(model)
    with capture(max_spans=100) as captured, TRACER.start_as_current_span("request"):
        generate(model)
    *shown, _ = captured.evaluations
    kept = n_spans(shown)
    assert kept[0] == calls[0]
    assert sum(kept) + len(shown) <= 100 + 10
    assert all(len(list(one.walk())) > 1 or one.attributes["torch.folded.calls"] == calls[0] for one in shown)


def test_detail_is_by_the_forward() -> None:
    """Every 16th, so some tokens of a request show their layers and the others their time alone."""
    model = llama()
    with capture(detail=16) as captured, TRACER.start_as_current_span("request"):
        generate(model)
    assert [count > 0 for count in n_spans(captured.evaluations)] == [True] + [False] * 10


def test_loading_and_saving_make_no_trace(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    with capture() as captured:
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert captured.roots == []


def tokenizer() -> Any:
    """Make a tokenizer of 64 words."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))  # noqa: S106  # a word
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0")  # noqa: S106  # as above


@pytest.mark.parametrize("carries", [True, False])
@pytest.mark.parametrize("engine", ENGINES)
def test_an_answer_that_a_thread_generates(engine: str, *, carries: bool) -> None:
    """Streamed by transformers' own streamer: the thread's forwards are the request's where it was given the context.

    A plain thread begins with none, as everywhere in OpenTelemetry, and then each forward is a trace of its own.
    """
    model, words, app = llama(), tokenizer(), FastAPI()

    @app.get("/stream")
    def stream() -> StreamingResponse:
        streamer = transformers.TextIteratorStreamer(words)
        work = partial(generate, model, streamer=streamer)
        threading.Thread(target=partial(copy_context().run, work) if carries else work).start()
        return StreamingResponse(streamer)

    with looked(engine) as look, served(app, look) as client:
        answer = client.get("/stream").text
    assert len(answer.split()) == PROMPT.numel() + TOKENS
    expected = [["GET /stream"]] * 11 if carries else [[]] * TOKENS
    assert look.above("torch.evaluation") == expected
    assert len(look.traces) == (1 if carries else TOKENS + 1)
