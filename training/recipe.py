"""Every number that the demo trio depends on, in one place."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

VARIANTS = ("baseline", "gate_headwise", "gate_elementwise")

# Copy operators that the tokenizer has; the recipe's `copy_operators` says how many of them are used.
TOKENIZER_OPERATORS = 16

# Whole works that no training sequence and no tokenizer merge has seen.
HELD_OUT = (
    "austen-persuasion",
    "bible-jonah",
    "bible-ruth",
    "shakespeare-tempest",
    "sotu-1801_thomas_jefferson_dr",
    "sotu-1862_abraham_lincoln_r",
    "sotu-1941_franklin_d_roosevelt_d",
    "sotu-1962_john_f_kennedy_d",
)
# The held-out works that are prose: what the figures in the model card are measured on.
HELD_OUT_PROSE = tuple(work for work in HELD_OUT if not work.startswith("shakespeare"))


@dataclass(frozen=True)
class Stage:
    """A stretch of training at one depth. When the next stage is deeper, copies of the layers are stacked.

    Args:
        layers: depth in this stage, a multiple of the stage before.
        steps: optimizer steps.
        lr: learning rate at the start and at the end of the stage; a line between the two.
        warmup: steps of linear warm-up to the stage's first learning rate.
        prose: share of sequences that are running text; the others are sampled from its token bigrams.
        operators: share of positions that hold a copy operator, in bigram sequences.
        prose_operators: the same in running text.
        length: tokens of a sequence, BOS included.
        bigram_power: bigram counts are raised to it; above 1, that text is more predictable.
    """

    layers: int
    steps: int
    lr: tuple[float, float] = (1e-2, 1e-2)
    warmup: int = 50
    prose: float = 0.0
    operators: float = 0.12
    prose_operators: float = 0.0
    length: int = 65
    bigram_power: float = 1.0


@dataclass(frozen=True)
class Recipe:
    """Shapes, data and optimizer of the trio. The three variants differ in the gate only."""

    # shapes
    vocab_size: int = 1024
    hidden_size: int = 128
    intermediate_size: int = 192
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 16
    max_position_embeddings: int = 32768  # what may be asked, not what is trained; rotary positions go on
    rope_theta: float = 10_000.0
    use_qk_norm: bool = False
    initializer_range: float = 0.02

    # data
    copy_operators: int = 4  # operator k asks for the token k places back
    tokens_per_step: int = 2048
    seed: int = 0

    # optimizer: AdamW
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1  # on matrices; never on norms
    clip: float = 1.0

    stages: tuple[Stage, ...] = (
        Stage(1, 400, warmup=200),
        Stage(2, 600),
        Stage(2, 300, prose=0.5, prose_operators=0.12),
        Stage(4, 200, prose=0.5, prose_operators=0.12),
        Stage(7, 150, prose=0.5, prose_operators=0.12),
        Stage(14, 200, prose=0.5, prose_operators=0.12),
        Stage(28, 250, prose=0.5, prose_operators=0.12),
        Stage(28, 500, lr=(1e-2, 1e-3), prose=0.7, prose_operators=0.1, length=129),
    )

    evaluate_every: int = 125
    checkpoint_every: int = 250

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Recipe:
        """The inverse of `to_dict`; what `values` does not name keeps its default."""
        values = dict(values)
        if "stages" in values:
            stages: list[dict[str, Any]] = [dict(stage) for stage in values["stages"]]
            for stage in stages:
                if "lr" in stage:
                    stage["lr"] = tuple(stage["lr"])
            values["stages"] = tuple(Stage(**stage) for stage in stages)
        if "betas" in values:
            values["betas"] = tuple(values["betas"])
        return cls(**values)


RECIPE = Recipe()
