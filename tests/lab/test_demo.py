"""The demo's trainings: from the same start, with curves that are what they say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from markupsafe import escape

from tam.lab import demo
from tam.lab.training.metrics import grad_norm
from tam.registry import OPTIMIZERS


def still(name: str) -> demo.OptimizerInfo:
    """The optimizer at a learning rate at which nothing moves."""
    return replace(OPTIMIZERS[name], lr=0.0)


def test_optimizers_of_one_seed_get_the_same_weights_and_batches() -> None:
    # With lr = 0 every step's loss and gradient is that of the start's weights and that step's batch.
    start = demo.start(3, 2)
    runs = [demo.train(still(name), start) for name in demo.NAMES]
    for run in runs[1:]:
        assert torch.equal(run.loss, runs[0].loss)
        assert torch.equal(run.grad_norm, runs[0].grad_norm)
        assert torch.equal(run.accuracy, runs[0].accuracy)


def test_training_leaves_the_start_as_it_was() -> None:
    start = demo.start(0, 1)
    before = [p.detach().clone() for p in start.model.parameters()]
    demo.train(OPTIMIZERS["sgdm"], start)
    assert all(torch.equal(p, q) for p, q in zip(start.model.parameters(), before, strict=True))


def test_a_seed_gives_the_same_start_again_and_another_a_different_one() -> None:
    torch.manual_seed(11)
    one = demo.start(0, 2)
    torch.manual_seed(12)
    again, other = demo.start(0, 2), demo.start(1, 2)

    def weights(start: demo.Start) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in start.model.parameters()])

    assert torch.equal(weights(one), weights(again)) and not torch.equal(weights(one), weights(other))
    assert torch.equal(one.orders, again.orders) and not torch.equal(one.orders, other.orders)
    assert torch.equal(one.train[0], again.train[0]) and not torch.equal(one.train[0], other.train[0])
    assert not torch.equal(one.orders[0], one.orders[1])


def test_a_run_is_repeatable() -> None:
    one, again = (demo.train(OPTIMIZERS["adatam"], demo.start(0, 1)) for _ in range(2))
    assert torch.equal(one.loss, again.loss) and one.last_alignment == again.last_alignment


def test_start_does_not_touch_the_global_generator() -> None:
    before = torch.get_rng_state()
    demo.start(0, 1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", demo.NAMES)
def test_curves(name: str) -> None:
    run = demo.train(OPTIMIZERS[name], demo.start(0, 2))
    assert run.loss.shape == run.accuracy.shape == run.grad_norm.shape == (2,)
    assert run.loss[1] < run.loss[0]
    assert run.accuracy.min() >= 0 and run.accuracy.max() <= 100
    if OPTIMIZERS[name].has_alignment:
        assert run.alignment is not None and run.alignment.shape == (2,)
        assert run.last_alignment is not None and -1 <= run.last_alignment <= 1
    else:
        assert run.alignment is None and run.last_alignment is None


def test_grad_norm_is_that_of_tam() -> None:
    start = demo.start(0, 1)
    optimizer = OPTIMIZERS["tam"].create(start.model.parameters())
    torch.nn.functional.cross_entropy(start.model(start.train[0]), start.train[1]).backward()
    norm = grad_norm(start.model)
    optimizer.step()
    torch.testing.assert_close(norm, optimizer.grad_norm, rtol=1e-4, atol=0)


def result(accuracy: float, s: float | None) -> demo.Run:
    curve = torch.tensor([0.0, accuracy])
    return demo.Run(curve, curve, curve, None if s is None else curve, s, 2.0)


def test_table_has_means_and_deviations_of_the_last_epoch() -> None:
    results = {
        "sgd": [result(90.0, None), result(92.0, None)],
        "tam": [result(95.0, 0.1), result(95.0, 0.3)],
    }
    table = demo.table(results)
    assert table.rows[0] == ["SGD", "0.1", "91.00 ± 1.41", "2.00", "-"]
    assert table.rows[1] == ["TAM", "0.2", "95.00 ± 0.00", "2.00", "+0.200"]
    assert len(table.header) == len(table.rows[0])


def test_one_seed_has_no_deviation() -> None:
    table = demo.table({"sgd": [result(90.0, None)]})
    assert table.rows[0][2] == "90.00"


def test_the_page_has_the_table_the_curves_and_the_facts() -> None:
    page = demo.report({"sgd": [result(90.0, None)], "tam": [result(95.0, 0.1)]}, 1, 2, 1.0)
    assert page.count("<svg ") == 4 and "<td>95.00</td>" in page and "<dt>processor</dt>" in page
    assert "test accuracy %\nmean ± std</th>" in page  # the style sheet keeps the line break


def runs(*accuracies: float) -> list[demo.Run]:
    return [result(accuracy, None) for accuracy in accuracies]


@pytest.mark.parametrize(
    "best, second, worth",
    [
        (runs(91.0, 93.0, 95.0), runs(92.0, 92.5, 93.5), "is within the noise."),
        (runs(91.0, 93.0, 95.0), runs(90.0, 92.1, 93.9), "is larger than the noise."),
        (runs(91.0), runs(90.0), "cannot be judged without a spread between seeds."),
        (runs(91.0, 92.0), runs(90.0, 91.0), "cannot be judged without a spread between seeds."),
    ],
)
def test_answer_names_the_best_and_what_its_lead_is_worth(
    best: list[demo.Run], second: list[demo.Run], worth: str
) -> None:
    (sentence,) = demo.answer({"sgd": runs(*[50.0] * len(best)), "adam": second, "adatam": best})
    mean, n = sum(float(run.accuracy[-1]) for run in best) / len(best), demo.count(len(best), "seed")
    assert sentence.startswith(
        f"AdaTAM has the highest mean test accuracy over {n}, {mean:.2f} %; its lead of "
    )
    assert sentence.endswith(f" points over Adam {worth}")


def test_answer_names_both_if_two_share_the_best_mean() -> None:
    (sentence,) = demo.answer({"sgd": runs(50.0, 50.0), "adam": runs(91.0, 92.0), "adatam": runs(92.0, 91.0)})
    assert sentence == "Adam and AdaTAM share the highest mean test accuracy over 2 seeds, 91.50 %."


@pytest.mark.parametrize(
    "sgdm, text",
    [
        (runs(95.1, 94.8, 95.2), "is within 1 point of TAM: the 95 % interval of"),
        (runs(99.0, 92.0, 95.0), "and TAM cannot be told apart here: the 95 % interval of"),
        (runs(97.1, 97.0, 96.9), "is better than TAM: the 95 % interval of"),
        (runs(93.1, 93.0, 92.9), "is worse than TAM: the 95 % interval of"),
        (runs(94.5), "differs from TAM by -0.50 points, and no spread says what that is worth."),
    ],
)
def test_answer_compares_sgdm_at_half_of_tams_lr(sgdm: list[demo.Run], text: str) -> None:
    sentence = demo.answer({"sgdm": sgdm, "tam": runs(*[95.0] * len(sgdm))})[1]
    assert sentence.startswith(f"SGDM at half of TAM's lr (0.1 instead of 0.2) {text}")


def test_page_opens_with_the_answer() -> None:
    results = {"sgdm": runs(94.9, 95.0, 95.2), "tam": runs(95.1, 95.0, 95.0)}
    page = demo.report(results, 3, 2, 1.0).replace("\u00a0", " ")
    first, second = (str(escape(sentence)) for sentence in demo.answer(results))
    body = page.split("</h1>")[1]
    assert body.lstrip().startswith(f'<p class="answer">{first}</p>')
    assert body.index(first) < body.index(f"<p>{second}</p>") < body.index("<table>")


def test_chart_curves_are_mean_and_range_over_the_seeds() -> None:
    results = {"sgd": [result(90.0, None)] * 2, "tam": [result(94.0, 0.1), result(96.0, 0.3)]}
    (line,) = demo.curves(results, "alignment")
    assert (line.name, line.style, line.x) == ("TAM", 1, [1, 2])
    assert (line.y, line.low, line.high) == ([0.0, 95.0], [0.0, 94.0], [0.0, 96.0])
