"""AdaTAMW against AdamW over many datasets, as the paper compares them on MTEB, and what it says of that.

    rows = read(MTEB)  # the paper's six tables, or rows of one's own
    print(text(rows))

All is exact, so that no threshold depends on rounding. A dataset counts where both optimizers have a score;
the others are left out, and counted as that.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tam.lab import charts
from tam.lab.charts import WIDTH, Axis, label_at
from tam.lab.store import LabError, write_whole

MTEB = Path(__file__).parent / "paper" / "mteb.csv"
BASELINE, OTHER = "AdamW", "AdaTAMW"
COLUMNS = ["model", "category", "dataset"]
THRESHOLDS = ("0", "0.2", "1")  # percent within which an average is similar
KINDS = ("better", "0.2", "1")  # of shares: higher scores, or also those within so many percent
SIMILAR = "0.2"  # the paper's


@dataclass(frozen=True)
class Row:
    """The scores on a dataset, by optimizer and epochs; what is missing is not among them."""

    model: str
    category: str
    dataset: str
    scores: Mapping[tuple[str, int], Fraction]

    def pair(self, epochs: int) -> tuple[Fraction, Fraction] | None:
        """AdamW's score and AdaTAMW's, where there are both."""
        keys = (BASELINE, epochs), (OTHER, epochs)
        return (self.scores[keys[0]], self.scores[keys[1]]) if self.scores.keys() >= {*keys} else None


@dataclass(frozen=True)
class Improvement:
    """Of the average over a category's datasets."""

    model: str
    category: str
    epochs: int
    n: int  # datasets with both scores
    missing: int
    percent: Fraction | None  # None where AdamW has no average above 0


@dataclass(frozen=True)
class Share:
    """On how many of its datasets a model is better, or similar or better."""

    model: str
    epochs: int
    n: int
    missing: int
    counts: Mapping[str, int]  # by kind

    def percent(self, kind: str) -> Fraction | None:
        return Fraction(100 * self.counts[kind], self.n) if self.n else None


@dataclass(frozen=True)
class Claim:
    """What the paper says, what the rows say, and whether they agree; None where they cannot tell."""

    words: str
    found: str
    agrees: bool | None

    def __str__(self) -> str:
        verdict = {True: "Agrees", False: "Does not agree", None: "Cannot be told"}[self.agrees]
        return f'"{self.words}" {verdict}: {self.found}.'


def read(path: Path) -> list[Row]:
    """The rows of a CSV file with a column for each optimizer and epochs (AdamW/3); a cell may be empty."""
    with path.open(newline="", encoding="utf-8") as file:
        header, *lines = list(csv.reader(file)) or [[]]
    if header[: len(COLUMNS)] != COLUMNS:
        raise LabError(f"{path}: its first columns must be {', '.join(COLUMNS)}")
    keys = [_key(name, path) for name in header[len(COLUMNS) :]]
    rows = [_row(keys, line, f"{path}, row {i}") for i, line in enumerate(lines, 2)]
    if len({(row.model, row.dataset) for row in rows}) < len(rows):
        raise LabError(f"{path}: has a dataset twice for one model")
    return rows


def _key(name: str, path: Path) -> tuple[str, int]:
    optimizer, _, epochs = name.rpartition("/")
    if not optimizer or not epochs.isdecimal():
        raise LabError(f"{path}: column {name!r} is not of an optimizer and epochs, as {BASELINE}/3 is")
    return optimizer, int(epochs)


def _row(keys: Sequence[tuple[str, int]], cells: Sequence[str], place: str) -> Row:
    if len(cells) != len(COLUMNS) + len(keys):
        raise LabError(f"{place}: {len(cells)} cells, but {len(COLUMNS) + len(keys)} columns")
    model, category, dataset, *scores = cells
    try:
        found = {key: Fraction(cell) for key, cell in zip(keys, scores, strict=True) if cell}
    except (ValueError, ZeroDivisionError) as error:
        raise LabError(f"{place}: a score is not a number: {error}") from error
    return Row(model, category, dataset, found)


# ---------------------------------------------------------------------- what is computed


def improvements(rows: Iterable[Row]) -> list[Improvement]:
    """Of every configuration: model, category and epochs."""
    return [
        _improvement(model, category, epochs, of)
        for model, datasets in _grouped(rows, lambda row: row.model).items()
        for category, of in _grouped(datasets, lambda row: row.category).items()
        for epochs in _epochs(datasets)
    ]


def _improvement(model: str, category: str, epochs: int, rows: Sequence[Row]) -> Improvement:
    pairs = [pair for row in rows if (pair := row.pair(epochs)) is not None]
    before = sum((a for a, _ in pairs), Fraction())
    after = sum((b for _, b in pairs), Fraction())
    percent = 100 * (after - before) / before if before > 0 else None
    return Improvement(model, category, epochs, len(pairs), len(rows) - len(pairs), percent)


def counts(found: Iterable[Improvement]) -> dict[str, dict[str, int]]:
    """How many configurations of a family are similar or better, by threshold."""
    return {
        family: {t: sum(percent >= -Fraction(t) for percent in percents) for t in THRESHOLDS}
        for family, percents in _percents(found, _family).items()
    }


def shares(rows: Iterable[Row]) -> list[Share]:
    """Of every model and epochs."""
    return [
        _share(model, epochs, datasets)
        for model, datasets in _grouped(rows, lambda row: row.model).items()
        for epochs in _epochs(datasets)
    ]


def _share(model: str, epochs: int, rows: Sequence[Row]) -> Share:
    pairs = [(row, pair) for row in rows if (pair := row.pair(epochs)) is not None]
    found = {kind: sum(_counts(row, *pair, kind) for row, pair in pairs) for kind in KINDS}
    return Share(model, epochs, len(pairs), len(rows) - len(pairs), found)


def _counts(row: Row, before: Fraction, after: Fraction, kind: str) -> bool:
    if kind == "better":
        return after > before
    highest = abs(max(row.scores.values()))  # correlations may all be below 0
    return after >= before - Fraction(kind) / 100 * highest


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The counts of the families, and the shares of the models in whole percent."""
    models: dict[str, dict[str, dict[str, int | None]]] = {}
    for share in shares(rows):
        percents = {kind: share.percent(kind) for kind in KINDS}
        whole = {kind: None if percent is None else round(percent) for kind, percent in percents.items()}
        models.setdefault(share.model, {})[str(share.epochs)] = whole
    return {"families": counts(improvements(rows)), "models": models}


def family_of(model: str) -> str:
    return model.partition("-")[0]


def _size_of(model: str) -> str:
    return model.partition("-")[2] or model


def _epochs(rows: Iterable[Row]) -> list[int]:
    return sorted({epochs for row in rows for _, epochs in row.scores})


def _grouped(rows: Iterable[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def _percents(found: Iterable[Improvement], key: Callable[[Improvement], str]) -> dict[str, list[Fraction]]:
    """Those there are; a group may have none."""
    groups: dict[str, list[Fraction]] = {}
    for one in found:
        groups.setdefault(key(one), []).extend([] if one.percent is None else [one.percent])
    return groups


# ---------------------------------------------------------------------- what the paper says


class Said(NamedTuple):
    """That a share is above this in all settings but some, or in most of them."""

    words: str
    kind: str
    above: Fraction
    but: Callable[[Share], bool]
    epochs: frozenset[int] = frozenset()  # the settings it is said of; none: all
    most: bool = False


SAID = (
    Said(
        "Except for BERT models with 10 epochs and RoBERTa-large, AdaTAMW performs similar/better in "
        "majority of the datasets.",
        SIMILAR,
        Fraction(1, 2),
        lambda s: s.model == "RoBERTa-large" or (family_of(s.model) == "BERT" and s.epochs == 10),
    ),
    Said(
        "Except for the RoBERTa-large and BERT-base fine-tuned on 10 epochs, AdaTAMW generally matches or "
        "exceeds AdamW's performance in most settings.",
        SIMILAR,
        Fraction(1, 2),
        # RoBERTa-large with any epochs, as above: the words leave it open.
        lambda s: s.model == "RoBERTa-large" or (s.model == "BERT-base" and s.epochs == 10),
        most=True,
    ),
    Said(
        "[E]xcept for DeBERTa-base, AdaTAMW achieves higher scores on more than two-thirds of the MTEB "
        "datasets for in the 3- and 5-epoch settings.",
        "better",
        Fraction(2, 3),
        lambda s: s.model == "DeBERTa-base",
        epochs=frozenset({3, 5}),
    ),
    Said(
        "[Similar: less than 1%] Except for the BERT-base fine-tuned on 10 epochs, AdaTAMW generally matches "
        "or exceeds AdamW's performance in most settings.",
        "1",
        Fraction(1, 2),
        lambda s: s.model == "BERT-base" and s.epochs == 10,
        most=True,
    ),
)


def claims(rows: Sequence[Row]) -> list[Claim]:
    """The paper's, each beside what these rows say."""
    found, of = improvements(rows), shares(rows)
    return [_configurations(found), *(_settings(said, of) for said in SAID), *_averages(found)]


def _configurations(found: Sequence[Improvement]) -> Claim:
    """28 of 42 are two in three, which can be asked of any number."""
    families = {family: of for family, of in _percents(found, _family).items() if of}
    needed = {family: math.ceil(Fraction(28, 42) * len(of)) for family, of in families.items()}
    similar = {family: n[SIMILAR] for family, n in counts(found).items() if family in families}
    agrees = all(n >= needed[family] for family, n in similar.items()) if similar else None
    told = ", ".join(f"{family} {n} of {len(families[family])}" for family, n in similar.items()) or "none"
    if agrees is False:
        least = max(-sorted(of)[-needed[family]] for family, of in families.items())
        told += f"; it would hold from {math.ceil(100 * least) / 100:g}% on"  # up: there it does hold
    return Claim(
        "Overall, AdaTAMW achieve similar or better performance than AdamW in at least 28 configurations "
        "across all three model types.",
        f"averages similar within {SIMILAR}% or better: {told}",
        agrees,
    )


def _settings(said: Said, of: Iterable[Share]) -> Claim:
    known = [share for share in of if share.n and (not said.epochs or share.epochs in said.epochs)]
    asked = [share for share in known if not said.but(share)]
    missed = [share for share in asked if share.counts[said.kind] <= said.above * share.n]
    excepted = [share for share in known if said.but(share)]
    held = len(asked) - len(missed)
    told = f"{_kind_told(said.kind)} on more than {said.above} of the datasets"
    told += f" in {held} of {len(asked)} settings"
    told += f"; not in {_shares_told(missed, said.kind)}" if missed else ""
    told += f"; excepted: {_shares_told(excepted, said.kind)}" if excepted else ""
    agrees = 2 * held > len(asked) if said.most else not missed
    return Claim(said.words, told, agrees if asked else None)


def _kind_told(kind: str) -> str:
    return "better" if kind == "better" else f"similar within {kind}% or better"


def _shares_told(of: Iterable[Share], kind: str) -> str:
    told = ((f"{share.model} with {share.epochs} epochs", share.percent(kind)) for share in of)
    return ", ".join(f"{setting} ({_percent(percent, '{:.1f}')}%)" for setting, percent in told)


def _averages(found: Sequence[Improvement]) -> Iterator[Claim]:
    bert, roberta = ([one for one in found if _family(one) == name] for name in ("BERT", "RoBERTa"))
    words = "AdaTAMW shows the highest improvements over AdamW on DeBERTa models"
    yield _led(words, {"DeBERTa"}, [_means(found, _family)])
    by_epochs = [
        _means((one for one in found if one.epochs == epochs), _with_epochs)
        for epochs in sorted({one.epochs for one in found})
    ]
    leaders = {f"DeBERTa with {one.epochs} epochs" for one in found}
    yield _led(f"{words} across configurations with varying numbers of epochs.", leaders, by_epochs)
    yield _led(
        "[R]esults for RoBERTa are more mixed, with the most significant improvements observed in Retrieval "
        "tasks.",
        {"Retrieval"},
        [_means(roberta, lambda one: one.category)],
    )
    yield _led(
        "For BERT models, while AdaTAMW generally delivers similar or better average scores, the most "
        "notable gains occur in the 3 and 5 epoch settings.",
        {"BERT with 3 epochs", "BERT with 5 epochs"},
        [_means(bert, _with_epochs)],
    )
    models = _means(found, lambda one: one.model)
    yield _led(
        "AdaTAMW yields larger improvements for BERT-large and DeBERTa-large models",
        {"BERT-large", "DeBERTa-large"},
        [{k: v for k, v in models.items() if family_of(k) == family} for family in ("BERT", "DeBERTa")],
    )
    yield _base_and_large(roberta)


def _family(one: Improvement) -> str:
    return family_of(one.model)


def _with_epochs(one: Improvement) -> str:
    return f"{_family(one)} with {one.epochs} epochs"


def _means(found: Iterable[Improvement], key: Callable[[Improvement], str]) -> dict[str, Fraction]:
    return {name: sum(of, Fraction()) / len(of) for name, of in _percents(found, key).items() if of}


def _led(words: str, leaders: set[str], groups: Iterable[Mapping[str, Fraction]]) -> Claim:
    """Whether in each group of means the leaders have the greatest; a group without others cannot tell."""
    told, held = [], []
    for means in groups:
        first = [mean for name, mean in means.items() if name in leaders]
        others = [mean for name, mean in means.items() if name not in leaders]
        if first and others:
            held.append(min(first) > max(others))
            told.append(", ".join(f"{name} {float(mean):+.2f}%" for name, mean in means.items()))
    return Claim(words, f"on average {'; '.join(told) or 'none'}", all(held) if held else None)


def _base_and_large(found: Sequence[Improvement]) -> Claim:
    base, large = (
        {
            (one.category, one.epochs): one.percent
            for one in found
            if one.model == model and one.percent is not None
        }
        for model in ("RoBERTa-base", "RoBERTa-large")
    )
    both = base.keys() & large.keys()
    higher = sum(base[key] > large[key] for key in both)
    return Claim(
        "[B]ut it performance on RoBERTa-large is less consistent, where RoBERTa-base often outperforms it.",
        f"the improvement of RoBERTa-base is the larger in {higher} of {len(both)} configurations",
        2 * higher > len(both) if both else None,
    )


# ---------------------------------------------------------------------- how it is shown


class Table(NamedTuple):
    title: str
    header: list[str]
    rows: list[list[str]]


def tables(rows: Sequence[Row]) -> list[Table]:
    """The counts of the families, the shares of the models, and the improvements."""
    found = improvements(rows)
    return [_families(found), _models(shares(rows)), _categories(found)]


def _families(found: Sequence[Improvement]) -> Table:
    known = {family: len(of) for family, of in _percents(found, _family).items()}
    total = Counter(map(_family, found))
    body = [
        [family, _of(known[family], total[family]), *map(str, by.values())]
        for family, by in counts(found).items()
    ]
    header = ["family", "configurations", *(f"within {t}%" for t in THRESHOLDS)]
    return Table(f"Configurations whose average is within so much of {BASELINE}'s, or better", header, body)


def _models(of: Iterable[Share]) -> Table:
    body = [
        [
            share.model,
            str(share.epochs),
            _of(share.n, share.n + share.missing),
            *(_percent(share.percent(kind), "{:.2f}") for kind in KINDS),
        ]
        for share in of
    ]
    header = ["model", "epochs", "datasets", *map(_kind_told, KINDS)]
    return Table(f"Datasets on which {OTHER} is better, in percent", header, body)


def _categories(found: Sequence[Improvement]) -> Table:
    categories = list(dict.fromkeys(one.category for one in found))
    settings: dict[tuple[str, int], dict[str, str]] = {}
    for one in found:
        settings.setdefault((one.model, one.epochs), {})[one.category] = _percent(one.percent, "{:+.2f}")
    body = [
        [model, str(epochs), *(cells.get(category, "") for category in categories)]
        for (model, epochs), cells in settings.items()
    ]
    title = f"Improvement of the average of {OTHER} over that of {BASELINE}, in percent"
    return Table(title, ["model", "epochs", *categories], body)


def _percent(value: Fraction | None, form: str) -> str:
    return "" if value is None else form.format(float(value))


def _of(n: int, total: int) -> str:
    return str(n) if n == total else f"{n} of {total}"


def text(rows: Sequence[Row]) -> str:
    """The tables and the claims."""
    parts = [f"{table.title}\n{_aligned([table.header, *table.rows])}" for table in tables(rows)]
    return "\n\n".join([*parts, *map(str, claims(rows))])


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    first = f"{{:<{widths[0]}}}"
    form = "  ".join([first, *(f"{{:>{width}}}" for width in widths[1:])])
    return "\n".join(form.format(*row) for row in rows)


def html(rows: Sequence[Row], title: str) -> str:
    """The same as a page, with the figures."""
    body = ["<h2>What the paper says</h2>", *(f"<p>{escape(str(claim))}</p>" for claim in claims(rows))]
    for table in tables(rows):
        body += [f"<h2>{escape(table.title)}</h2>", charts.table(table.header, table.rows)]
    body += ["<h2>Figures</h2>", '<div class="charts">', *figures(rows), "</div>"]
    return charts.page(title, "\n".join(body))


def write(rows: Sequence[Row], title: str, target: Path) -> None:
    write_whole(target, html(rows, title).encode())


# ---------------------------------------------------------------------- figures


class Bar(NamedTuple):
    """Parts from the first bound to the second, to the third and so on, and what is written at the end."""

    label: str
    bounds: Sequence[float]
    styles: Sequence[int]  # of the parts
    told: str


# Of the page's colours; the values are written beside the bars for those who cannot tell them apart.
_GOOD, _NEAR, _FAR, _BAD = 2, 6, 4, 1
_LEFT, _RIGHT, _TOP, _BOTTOM, _LINE = 205, 100, 34, 70, 15


def figures(rows: Sequence[Row], other: str = OTHER, baseline: str = BASELINE) -> list[str]:
    """Each family's improvements by configuration, and the shares of all models; of what, say the names."""
    found = improvements(rows)
    improved = [
        _bar_chart(
            [_improved(one) for one in found if _family(one) == family],
            f"{family}: {other}, improvement of the average over {baseline}",
            "%, by size / category, epochs",
            {"better": _GOOD, "worse": _BAD},
        )
        for family in dict.fromkeys(map(_family, found))
    ]
    legend = dict(zip(map(_kind_told, KINDS), (_GOOD, _NEAR, _FAR), strict=True))
    title, label = f"{other} better than {baseline}, or similar", "% of the datasets, by model, epochs"
    return [*improved, _bar_chart([*map(_shared, shares(rows))], title, label, legend)]


def _improved(one: Improvement) -> Bar:
    label = f"{_size_of(one.model)} / {one.category}, {one.epochs}"
    if one.percent is None:
        return Bar(label, [], [], "no figure")
    style = _GOOD if one.percent >= 0 else _BAD
    return Bar(label, [0, float(one.percent)], [style], f"{float(one.percent):+.2f}")


def _shared(share: Share) -> Bar:
    label = f"{share.model}, {share.epochs}"
    percents = [float(p) for kind in KINDS if (p := share.percent(kind)) is not None]
    if not percents:
        return Bar(label, [], [], "no figure")
    return Bar(label, [0, *percents], [_GOOD, _NEAR, _FAR], " / ".join(f"{p:.0f}" for p in percents))


def _bar_chart(bars: Sequence[Bar], title: str, x_label: str, legend: Mapping[str, int]) -> str:
    """Horizontal bars as an `<svg>` element, in the style of the lab's line charts."""
    bottom = _TOP + _LINE * len(bars)
    axis = Axis([0, *(x for bar in bars for x in bar.bounds)], _LEFT, WIDTH - _RIGHT, margin=0.02)
    parts = [label_at(12, 18, title, "start", "title")]
    for value, label in axis.ticks:
        parts.append(f'<path class="grid" d="M{axis(value):.1f} {_TOP}V{bottom}"/>')
        parts.append(label_at(round(axis(value), 1), bottom + 16, label, "middle", "dim"))
    for i, bar in enumerate(bars):
        parts += _drawn(bar, axis, _TOP + i * _LINE)
    parts.append(f'<path class="axis" d="M{axis(0):.1f} {_TOP}V{bottom}"/>')
    parts.append(label_at((_LEFT + WIDTH - _RIGHT) / 2, bottom + 34, x_label, "middle"))
    x = 12.0
    for name, style in legend.items():
        parts.append(f'<rect class="dot s{style}" x="{x:g}" y="{bottom + 48}" width="12" height="12"/>')
        parts.append(label_at(x + 18, bottom + 58, name, "start"))
        x += 40 + 6.4 * len(name)
    body, box = "\n".join(parts), f'viewBox="0 0 {WIDTH} {bottom + _BOTTOM}"'
    return f'<svg class="chart" {box} role="img" aria-label="{escape(title)}">\n{body}\n</svg>'


def _drawn(bar: Bar, axis: Axis, y: float) -> Iterator[str]:
    yield label_at(_LEFT - 7, y + 12, bar.label, "end", "dim")
    for (start, end), style in zip(pairwise(bar.bounds), bar.styles, strict=True):
        left, right = sorted((axis(start), axis(end)))
        place = f'x="{left:.1f}" y="{y + 2:g}" width="{right - left:.1f}" height="{_LINE - 4}"'
        told = escape(f"{bar.label}: {bar.told}")
        yield f'<rect class="dot s{style}" {place}><title>{told}</title></rect>'
    yield label_at(WIDTH - 12, y + 12, bar.told, "end")
