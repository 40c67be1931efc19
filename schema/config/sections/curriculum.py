"""`[train.train_policy.curriculum]`: which prompts come when; off unless a key says otherwise."""

from __future__ import annotations

from typing import Literal

from schema.config.base import Count, Natural, Section
from schema.config.key import key

ResultsOrder = Literal["none", "easiest_first", "hardest_first", "uncertain_first"]
_ORDER = "request or reply: Order of the rows."


# fmt: off
class CurriculumStage(Section):
    """`[[train.train_policy.curriculum.stage]]`: shares that count from a step on."""

    from_step: Count = key(1,
        "The step from which these shares count, until those of the next stage. Prompts are handed out ahead, so "
        "what is trained follows within the bound of staleness.",
        acts="request or reply: Which part or domain the next prompt is of.", example=200)
    shares: dict[str, float] = key({},
        "Share of each part (by its `source`) or domain, which add up to 1. One that is not named has none for as "
        "long.", acts="request or reply: Which part or domain the next prompt is of.",
        example={"easy": 0.2, "hard": 0.8})


class CurriculumConfig(Section):
    """Which prompts come when."""

    stage: list[CurriculumStage] = key([],
        "Shares that change with the step, one table each: [[train.train_policy.curriculum.stage]]. Before the first "
        "stage the shares of the parts or domains count.")
    column_name: str = key("",
        "Column of numbers by which each pass goes through the rows of its source, the smallest first; equal ones "
        "come in the order that they have otherwise. Dots reach into structs. Empty: none.", acts=_ORDER,
        example="difficulty")
    descending: bool = key(False, "Whether the largest number of column_name comes first.", acts=_ORDER)
    order_by_results: ResultsOrder = key("none",
        "From the second pass on: order of rows by the share of their answers that passed so far, from high "
        "(`easiest_first`), from low (`hardest_first`) or from one half (`uncertain_first`). A row without a result "
        "counts as one half. The order of a pass is fixed, and stored, before its first prompt is handed out.",
        acts=_ORDER)
    leave_out_solved: Natural = key(0,
        "From the second pass on: a row is left out once all answers of so many of its groups passed; the others "
        "take its place, and where none is left, none is left out. 0: never.",
        acts="request or reply: Rows of later passes.", example=2)
    leave_out_failed: Natural = key(0,
        "From the second pass on: a row is left out once no answer of so many of its groups passed. 0: never.",
        acts="request or reply: Rows of later passes.", example=3)
    pass_score: float = key(1.0, "Score from which on an answer has passed.",
        acts="request or reply: Order and rows of later passes.")

    @property
    def follows_results(self) -> bool:
        """Whether later passes depend on the scores of earlier ones."""
        return self.order_by_results != "none" or bool(self.leave_out_solved or self.leave_out_failed)
