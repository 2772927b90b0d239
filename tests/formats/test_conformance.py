"""`ckpt/testing/conformance.py`: the formats in `converters` pass the suite for third-party formats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckpt.plan import registry
from ckpt.testing import Conformance, Declaration
from tests.formats.declarations import CONTAINERS, DECLARATIONS
from tests.support.sampling import sample

#: Formats whose files are alike. Each source is converted to each kind, and each kind to each target.
KINDS = {
    "DeepSpeed": ("zero0", "zero1", "zero2", "zero3", "universal"),
    "ranks": ("fsdp-ranks",),
    "torch": ("dcp", "torch-checkpointing", "full"),
    "Megatron": ("megatron", "megatron-dist", "megatron-deepspeed"),
    "model": ("hf", "gguf"),
    "adapter": ("peft",),
    "trainer": ("trainer",),
}
KIND_OF = {format: kind for kind, formats in KINDS.items() for format in formats}
#: Pairs with branches of their own.
ODD = (
    ("gguf", "hf"),
    ("universal", "hf"),
    ("dcp", "zero3"),
    ("megatron-deepspeed", "megatron"),
    ("megatron-dist", "megatron"),
)


def test_every_format_is_declared() -> None:
    assert sorted(d.format for d in DECLARATIONS) == sorted(n for n in registry.FORMATS if registry.get(n).reads)


class TestFormats(Conformance):
    declarations = DECLARATIONS
    containers = CONTAINERS
    most_mutations = sample((60, Conformance.most_mutations), lambda _: ("number",))[-1]

    def chosen(self, pairs: Sequence[tuple[Declaration, str]]) -> Sequence[tuple[Declaration, str]]:
        def facets(pair: tuple[Declaration, str]) -> Iterator[tuple[str, ...]]:
            source, target = pair[0].format, pair[1]
            yield from ((source, KIND_OF[target]), (KIND_OF[source], target))
            if source == target or (source, target) in ODD:
                yield "itself", source, target

        return sample(pairs, facets)
