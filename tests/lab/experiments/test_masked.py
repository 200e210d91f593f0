"""The loss of masked tokens against one of all tokens' logits; the gradients' way; what is compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tam.lab.core.errors import LabError
from tam.lab.experiments.llm import masked
from tam.lab.experiments.llm.masked import BackwardPass, MaskedLoss, compile_layers
from tam.lab.experiments.llm.tokens import IGNORED, select_masked

transformers = pytest.importorskip("transformers")
CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 97, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 40,
}  # fmt: skip


def make(kind: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **more})
    return transformers.AutoModelForMaskedLM.from_config(config).train()


def batch(seed: int, share: float = 0.15) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """As the collator makes it, and all tokens' labels."""
    torch.manual_seed(seed)
    ids = torch.randint(5, 97, (4, 32))
    labels = torch.where(torch.rand(4, 32) < share, ids, IGNORED)
    places, chosen = select_masked(labels.flatten())
    return {"input_ids": ids, "places": places, "labels": chosen}, labels


@pytest.mark.parametrize(
    ("kind", "more"),
    [("bert", {}), ("roberta", {}), ("deberta", {}), ("deberta", {"legacy": False}), ("deberta-v2", {})],
)
def test_the_head_needs_no_other_tokens(kind: str, more: dict[str, Any]) -> None:
    ours, theirs = make(kind, **more), make(kind, **more)
    ours.load_state_dict(theirs.state_dict())
    backward = BackwardPass(MaskedLoss(ours), CPU, graph=False)
    for step in range(2):  # the second one is not added to the first
        made, labels = batch(step)
        torch.manual_seed(7)
        loss = backward(ours, made)
        torch.manual_seed(7)
        whole = theirs(made["input_ids"], labels=labels).loss
        theirs.zero_grad()
        whole.backward()
        torch.testing.assert_close(loss, whole.detach())
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-7)


class Replayed:
    """Does as a CUDA graph: its second call and all later ones write where the first one has written."""

    def __init__(self, step: Any, device: torch.device) -> None:
        self.step, self.kept = step, None

    def __call__(self) -> None:
        backward, (model, read) = self.step.func.__self__, self.step.args
        shape = read["places"].shape
        self.step()
        if self.kept is None:
            self.kept = backward.outputs[shape]
            return
        loss, gradients = backward.outputs[shape]
        self.kept[0].copy_(loss)
        for (_, mine), (_, new) in zip(self.kept[1], gradients, strict=True):
            mine.copy_(new)
        backward.outputs[shape] = self.kept
        model.zero_grad()  # a replay gives no parameter its gradient


def test_replays_are_plain_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two shapes in turn, gradients taken away and clipped in place, dropout drawn from the step."""
    monkeypatch.setattr(masked, "CapturedStep", Replayed)
    both, losses = [], []
    for graph in (True, False):
        model = make("bert")
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        backward = BackwardPass(MaskedLoss(model), CPU, graph)
        found = []
        for step in range(9):
            torch.manual_seed(step)
            made = batch(step, 0.5 if step % 3 == 1 else 0.1)[0]
            torch.manual_seed(step)
            found.append(backward(model, made))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        both.append([p.detach() for p in model.parameters()])
        losses.append(torch.stack(found))
        assert len(backward.steps) == (2 if graph else 0)
    assert torch.equal(*losses)
    assert all(torch.equal(p, q) for p, q in zip(*both, strict=True))


def test_layers_are_compiled_once_for_all_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a compiled network does what it did."""
    compiled = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **how: compiled(self, backend="aot_eager", **how)
    )
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]
    graphs.clear()
    made = batch(0)[0]
    for count in (0, 1):
        ours, theirs = (make("bert").eval() for _ in range(2))  # a compiled dropout draws otherwise
        assert compile_layers(ours)
        loss, whole = MaskedLoss(ours), MaskedLoss(theirs)(theirs, made)
        with torch.compiler.set_stance("force_eager"):
            assert torch.equal(loss(ours, made), whole)
        assert graphs["unique_graphs"] == count
        torch.testing.assert_close(loss(ours, made), whole)
        assert graphs["unique_graphs"] == 1


def test_no_attention_mask_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not even where transformers cannot look for padding; a network that is kept knows nothing of it."""
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **how: None)
    monkeypatch.setattr(transformers.masking_utils, "_ignore_bidirectional_mask_sdpa", lambda *given: False)
    sdpa, masks = torch.nn.functional.scaled_dot_product_attention, []

    def watched(*given: Any, **more: Any) -> torch.Tensor:
        masks.append(more.get("attn_mask"))
        return sdpa(*given, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    model, made = make("bert"), batch(0)[0]
    MaskedLoss(model)(model, made)
    assert masks and all(mask is not None for mask in masks)
    masks.clear()
    other = make("bert")
    assert compile_layers(other)
    MaskedLoss(other)(other, made)
    assert len(masks) == 3 and all(mask is None for mask in masks)
    other.save_pretrained(tmp_path)
    kept = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert kept.config._attn_implementation == "sdpa"


def test_an_attention_of_its_own_is_left_as_it_is() -> None:
    """ModernBERT's has windows, for which transformers makes a mask."""
    for kind, more in (("deberta", {}), ("modernbert", {"pad_token_id": 0, "local_attention": 16})):
        model = make(kind, **more).eval()
        ids = torch.randint(5, 97, (2, 32), generator=torch.Generator().manual_seed(0))
        before = model(ids).logits
        assert not compile_layers(model)
        assert torch.equal(model(ids).logits, before)


def test_no_encoder_with_a_head() -> None:
    config = transformers.BartConfig(
        vocab_size=97, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
    )  # fmt: skip
    with pytest.raises(LabError, match="BartForConditionalGeneration is not an encoder"):
        MaskedLoss(transformers.BartForConditionalGeneration(config))
    with pytest.raises(LabError, match="BertModel is not an encoder"):
        MaskedLoss(make("bert").base_model)
