"""Text as features for models without a Transformer: n-grams of words and characters, weighted, or projected by LSA."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy.sparse as sp
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer

from taskgraft.tasks.task import Task

TOKEN = r"\w+|[^\w\s]"  # punctuation too: it tells questions from shouting


@dataclass(frozen=True)
class Terms:
    """The `most` frequent n-grams of words or characters, weighted; with `lsa`, projected onto so many directions."""

    analyzer: str
    ngrams: tuple[int, int]
    weighting: str = "tfidf"  # or counts, presence
    most: int = 50_000
    lsa: int | None = None


FEATURES: dict[str, tuple[Terms, ...]] = {  # several stand side by side
    "words": (Terms("word", (1, 1)),),
    "frequent words": (Terms("word", (1, 1), most=4_000),),
    "word 1-2-grams": (Terms("word", (1, 2)),),
    "word counts": (Terms("word", (1, 1), "counts"),),
    "word 1-2-gram presence": (Terms("word", (1, 2), "presence"),),
    "character 1-3-grams": (Terms("char_wb", (1, 3)),),
    "character 2-5-grams": (Terms("char_wb", (2, 5)),),
    "words and characters": (Terms("word", (1, 2)), Terms("char_wb", (2, 5))),
    "LSA 50 of words": (Terms("word", (1, 2), most=20_000, lsa=50),),
    "LSA 200 of words": (Terms("word", (1, 2), most=20_000, lsa=200),),
    "LSA 200 of characters": (Terms("char_wb", (2, 5), most=20_000, lsa=200),),
}
LSA = tuple(name for name, parts in FEATURES.items() if parts[0].lsa)
SPARSE = tuple(name for name in FEATURES if name not in LSA)
TFIDF = tuple(name for name in SPARSE if FEATURES[name][0].weighting == "tfidf")


class Matrices:
    """The splits' rows under each name of FEATURES, made when first asked for, by what was fitted on `train` alone.

    Of a pair, the two texts' terms stand apart, followed by those they share and by how much they overlap.
    """

    def __init__(self, task: Task, seed: int) -> None:
        names = ("text", "pair") if task.has_pairs else ("text",)
        self.texts = {split: [table.column(name).to_pylist() for name in names] for split, table in task.splits.items()}
        self.seed = seed
        self.matrix = functools.cache(self._matrix)
        self.vectoriser = functools.cache(self._vectoriser)
        self.weighted = functools.cache(self._weighted)
        self.projection = functools.cache(self._projection)

    def _vectoriser(self, terms: Terms) -> Any:
        options: dict[str, Any] = {"analyzer": terms.analyzer, "ngram_range": terms.ngrams, "max_features": terms.most}
        if terms.analyzer == "word":
            options["token_pattern"] = TOKEN
        if terms.weighting == "tfidf":
            made = TfidfVectorizer(sublinear_tf=True, **options)
        else:
            made = CountVectorizer(binary=terms.weighting == "presence", **options)
        return made.fit(list(itertools.chain(*self.texts["train"])))

    def _weighted(self, terms: Terms, split: str) -> Any:
        blocks = [self.vectoriser(terms).transform(column) for column in self.texts[split]]
        if len(blocks) == 2:
            blocks.append(blocks[0].multiply(blocks[1]))
        return sp.hstack(blocks, format="csr")

    def _projection(self, terms: Terms) -> Any:
        weighted = self.weighted(replace(terms, lsa=None), "train")
        size = max(1, min(terms.lsa or 1, min(weighted.shape) - 1))
        return TruncatedSVD(size, n_iter=3, random_state=self.seed).fit(weighted)

    def _matrix(self, name: str, split: str) -> Any:
        parts = FEATURES[name]
        blocks = [self.weighted(replace(terms, lsa=None), split) for terms in parts]
        extra = [overlap(*self.texts[split])] if len(self.texts[split]) == 2 else []
        if name in LSA:
            return np.hstack([self.projection(parts[0]).transform(blocks[0]), *extra])
        return sp.hstack([*blocks, *extra], format="csr")


def overlap(texts: Sequence[str], pairs: Sequence[str]) -> Any:
    """How alike each pair is, in words: shared of all, of the first's, of the second's, and the lengths' ratio."""
    rows = []
    for text, pair in zip(texts, pairs, strict=True):
        a, b = set(text.lower().split()), set(pair.lower().split())
        shared = len(a & b)
        sizes = (len(a | b), len(a), len(b))
        rows.append([*(shared / max(1, size) for size in sizes), min(sizes[1:]) / max(1, *sizes[1:])])
    return np.asarray(rows, dtype=np.float64).reshape(-1, 4)
