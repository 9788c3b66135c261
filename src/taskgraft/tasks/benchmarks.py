"""The papers' benchmark tasks as a table, and a task from a row of it.

The groups: GLUE (both papers), SQuAD v1.1 and the 17 further classification tasks (Houlsby et al.), and the sets that
HyperFormer is transferred to.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from taskgraft.errors import GraftError
from taskgraft.tasks.protocols import PROTOCOLS, without_repeats
from taskgraft.tasks.published import Benchmark, Hub, read_files, read_hub
from taskgraft.tasks.task import Task

LARGE = 10_000  # training rows, of the published set: from here on validation is held out of them


def _glue(name: str, columns: tuple[str, ...], labels: tuple[str, ...], train: int, dev: int, **row: Any) -> Benchmark:
    row = {"protocol": "dev", "published": {"train": train, "validation": dev}, **row}
    return Benchmark(f"glue/{name}", f"glue/{name}", Hub("nyu-mll/glue", name), (*columns, "label"), labels, **row)


def _houlsby(name: str, labels: tuple[str, ...], rows: int, hub: Hub | None = None, **row: Any) -> Benchmark:
    row = {"published": {"all": rows}, **row}
    return Benchmark(f"classification/{name}", f"extra/{name}", hub, ("text", "label"), labels, **row)


def _transfer(name: str, hub: Hub, columns: tuple[str, ...], labels: tuple[str, ...], protocol: str,
              published: dict[str, int], **row: Any) -> Benchmark:  # fmt: skip
    return Benchmark(f"transfer/{name}", f"fewshot/{name}", hub, (*columns, "label"), labels, protocol=protocol,
                     published=published, **row)  # fmt: skip


ENTAILMENT = ("entailment", "not_entailment")
SENTENCES = ("sentence1", "sentence2")
UNUSED = ("The labelled test rows that exist are not used.",)
NEWSGROUPS = (
    "alt.atheism", "comp.graphics", "comp.os.ms-windows.misc", "comp.sys.ibm.pc.hardware", "comp.sys.mac.hardware",
    "comp.windows.x", "misc.forsale", "rec.autos", "rec.motorcycles", "rec.sport.baseball", "rec.sport.hockey",
    "sci.crypt", "sci.electronics", "sci.med", "sci.space", "soc.religion.christian", "talk.politics.guns",
    "talk.politics.mideast", "talk.politics.misc", "talk.religion.misc",
)  # fmt: skip
EMOTIONS = (
    "anger", "boredom", "empty", "enthusiasm", "fun", "happiness", "hate", "love", "neutral", "relief", "sadness",
    "surprise", "worry",
)  # fmt: skip
PRIMARY_EMOTIONS = (
    "Aggression", "Ambiguous", "Anger", "Anticipation", "Awe", "Contempt", "Disapproval", "Disgust", "Fear", "Joy",
    "Love", "Neutral", "Optimism", "Remorse", "Sadness", "Submission", "Surprise", "Trust",
)  # fmt: skip
MESSAGES = ("attack", "constituency", "information", "media", "mobilization", "other", "personal", "policy", "support")
PRODUCTS = (
    "Bank account or service, Savings account",
    "Consumer loan, Vehicle loan or lease, Payday loan, title loan, or personal loan",
    "Credit card or prepaid card",
    "Credit reporting, credit repair services, or other personal consumer reports",
    "Debt collection",
    "Money transfer, virtual currency, or money service",
    "Mortgage",
    "Student loan",
)

ROWS = (
    _glue("cola", ("sentence",), ("unacceptable", "acceptable"), 8_551, 1_043, metrics=("matthews",)),
    _glue("sst2", ("sentence",), ("negative", "positive"), 67_349, 872),
    _glue("mrpc", SENTENCES, ("not_equivalent", "equivalent"), 3_668, 408, metrics=("accuracy", "f1"), notes=UNUSED),
    _glue("stsb", SENTENCES, (), 5_749, 1_500, kind="regression", metrics=("pearson", "spearman"), notes=UNUSED),
    _glue("qqp", ("question1", "question2"), ("not_duplicate", "duplicate"), 363_846, 40_430,
          metrics=("accuracy", "f1")),
    _glue("mnli", ("premise", "hypothesis"), ("entailment", "neutral", "contradiction"), 392_702, 9_815,
          protocol="mnli", may_lack=("validation_mismatched",),
          published={"train": 392_702, "validation_matched": 9_815, "validation_mismatched": 9_832}),
    _glue("qnli", ("question", "sentence"), ENTAILMENT, 104_743, 5_463),
    _glue("rte", SENTENCES, ENTAILMENT, 2_490, 277),
    _glue("wnli", SENTENCES, ENTAILMENT[::-1], 635, 71, notes=("Both papers leave WNLI out.",)),
    Benchmark("squad/squad", "squad/squad_v1.1", Hub("rajpurkar/squad", "plain_text"),
              ("question", "context", "answers"), kind="spans", metrics=("squad_f1",), protocol="dev",
              published={"train": 87_599, "validation": 10_570}),
    _transfer("scitail", Hub("allenai/scitail", "snli_format", (*SENTENCES, "gold_label"), ("entailment", "neutral")),
              ("premise", "hypothesis"), ("entails", "neutral"), "published",
              {"train": 23_596, "validation": 1_304, "test": 2_126}, may_lack=("train", "validation")),
    _transfer("cb", Hub("aps/super_glue", "cb"), ("premise", "hypothesis"), ("entailment", "contradiction", "neutral"),
              "dev", {"train": 250, "validation": 56}),
    _transfer("boolq", Hub("aps/super_glue", "boolq"), ("question", "passage"), ("False", "True"), "dev",
              {"train": 9_427, "validation": 3_270}),
    _transfer("imdb", Hub("stanfordnlp/imdb", "plain_text"), ("text",), ("neg", "pos"), "test",
              {"train": 25_000, "test": 25_000}),
    _transfer("yelp_polarity", Hub("fancyzhx/yelp_polarity", "plain_text", classes=("1", "2")), ("text",),
              ("negative", "positive"), "test", {"train": 560_000, "test": 38_000}),
    _transfer("paws", Hub("google-research-datasets/paws", "labeled_final", classes=("0", "1")), SENTENCES,
              ("not_paraphrase", "paraphrase"), "published", {"train": 49_401, "validation": 8_000, "test": 8_000}),
    _transfer("trec", Hub("SetFit/TREC-QC", columns=("text", "label_coarse_original")), ("text",),
              ("ABBR", "ENTY", "DESC", "HUM", "LOC", "NUM"), "test", {"train": 5_452, "test": 500}),
    _houlsby("20_newsgroups", NEWSGROUPS, 18_846, Hub("SetFit/20_newsgroups", columns=("text", "label_text"),
             note="This copy is without headers, footers and quotes."),
             protocol="test", published={"train": 11_314, "test": 7_532}),
    _houlsby("crowdflower_airline", ("negative", "neutral", "positive"), 14_640,
             Hub("tasksource/crowdflower", "airline-sentiment")),
    _houlsby("crowdflower_corporate_messaging", ("Action", "Dialogue", "Exclude", "Information"), 3_118,
             Hub("tasksource/crowdflower", "corporate-messaging")),
    _houlsby("crowdflower_disasters", ("Not Relevant", "Relevant"), 10_860),
    _houlsby("crowdflower_economic_news_relevance", ("no", "yes"), 7_991,
             Hub("tasksource/crowdflower", "economic-news", left_out=("not sure",))),
    _houlsby("crowdflower_emotion", EMOTIONS, 40_000, Hub("tasksource/crowdflower", "text_emotion")),
    _houlsby("crowdflower_political_audience", ("constituency", "national"), 5_000,
             Hub("tasksource/crowdflower", "political-media-audience")),
    _houlsby("crowdflower_political_bias", ("neutral", "partisan"), 5_000,
             Hub("tasksource/crowdflower", "political-media-bias")),
    _houlsby("crowdflower_political_message", MESSAGES, 5_000,
             Hub("tasksource/crowdflower", "political-media-message")),
    _houlsby("crowdflower_primary_emotions", PRIMARY_EMOTIONS, 2_524),
    _houlsby("crowdflower_us_economic_performance", ("not_relevant", "relevant"), 4_952),
    _houlsby("customer_complaints", PRODUCTS, 183_334, protocol="test", published={},
             notes=("The label is one of 8 products; Houlsby et al. have 183,334 complaints and 157 issues.",)),
    _houlsby("news_aggregator", ("b", "t", "e", "m"), 422_937),
    _houlsby("sms_spam", ("ham", "spam"), 5_574, Hub("ucirvine/sms_spam", "plain_text", ("sms", "label"))),
)  # fmt: skip
BENCHMARKS: Mapping[str, Benchmark] = {row.name: row for row in ROWS}

# Of the 17 classification tasks, those that have no row above.
WITHOUT_DATA: Mapping[str, str] = {
    "crowdflower_global_warming": "the class names of the copies on the Hub could not be checked",
    "crowdflower_progressive_opinion": "no public copy is known",
    "crowdflower_progressive_stance": "no public copy is known",
}


def benchmark_named(name: str) -> Benchmark | None:
    """The row of this name ("glue/cola", or "cola" alone); "sst-2", "sst_2" and "sst2" are the same."""

    def plain(text: str) -> str:
        return text.lower().replace("-", "").replace("_", "")

    found = [row for row in ROWS if plain(name) in (plain(row.name), plain(row.name.split("/")[1]))]
    return found[0] if len(found) == 1 else None


def load_benchmark(
    name: str, data_dir: str | PathLike[str] | None = None, seed: int = 0, *, whole_dev: bool = False
) -> Task:
    """A benchmark's rows in the papers' splits: from DATA_DIR/FOLDER/PART.parquet, or from the Hub.

    `seed` draws the splits. It is not the seed of training: leave it as it is, so that results compare. `whole_dev`
    keeps a small set's published validation rows together as the test split, and validates on some of its train.
    """
    benchmark = benchmark_named(name)
    if benchmark is None:
        reason = WITHOUT_DATA.get(name.split("/")[-1].replace("-", "_"))
        known = f"{reason}." if reason else f"use one of {', '.join(BENCHMARKS)}."
        raise GraftError(f"benchmark {name!r} is {'not available' if reason else 'unknown'}: {known}")
    columns, where = benchmark.columns, str(data_dir)
    if data_dir is not None:
        parts, notes = read_files(benchmark, Path(data_dir))
    else:
        parts, notes = read_hub(benchmark)
        if benchmark.hub is not None:
            columns, where = benchmark.hub.columns or columns, f"{benchmark.hub.id} on the Hub"
    notes += [f"{part}: {len(table):,} rows; the published set has {benchmark.published[part]:,}."
              for part, table in parts.items() if len(table) != benchmark.published.get(part, len(table))]  # fmt: skip
    large = benchmark.published.get("train", len(parts.get("train", ()))) >= LARGE
    parts, repeats = without_repeats(parts)
    protocol = "whole dev" if whole_dev and benchmark.protocol == "dev" else benchmark.protocol
    splits, note = PROTOCOLS[protocol][1](parts, large, seed)
    names = ("text", "pair", "label") if benchmark.has_pairs else ("text", "label")
    return Task(
        name=benchmark.name.split("/")[1],
        kind=benchmark.kind,
        labels=benchmark.labels,
        metrics=benchmark.metrics,
        splits=splits,
        source=f"{benchmark.name} from {where}",
        columns=dict(zip(names, columns, strict=True)),
        notes=(*benchmark.notes, *notes, *repeats, f"{note[0].upper()}{note[1:]}"),
    )
