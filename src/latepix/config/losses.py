"""The settings of the policy losses; their formulas are in `trainer/loss.py`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from latepix.config.section import Section

#: Settings of each loss, and what they are where the run does not say.
_SETTINGS: dict[str, dict[str, float | None]] = {
    "trust_region": {
        "max_prob_increase": 0.2,
        "max_prob_decrease": 0.2,
        "log_ratio_penalty": 0.0,
        "importance_cap": None,
    },
    "grpo_clip": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
    "cispo": {"clip_low": 1.0, "clip_high": 4.0},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
}


class LossConfig(Section):
    """The policy loss. A setting that is left out takes the default of its `type` (docs/algorithms.md)."""

    type: Annotated[str, Field(pattern=r"^(trust_region|grpo_clip|cispo|gspo|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$")] = (
        "trust_region"
    )
    """trust_region, grpo_clip, cispo, gspo, or `module:function` of a function that gives each token a term."""
    max_prob_increase: Annotated[float, Field(gt=0, le=1)] | None = None
    """trust_region: a token with positive advantage stops pulling once its probability rose by more than this."""
    max_prob_decrease: Annotated[float, Field(gt=0, le=1)] | None = None
    """trust_region: a token with negative advantage stops pushing once its probability fell by more than this."""
    log_ratio_penalty: Annotated[float, Field(ge=0)] | None = None
    """trust_region: weight of the squared log-ratio, over all trained tokens."""
    importance_cap: Annotated[float, Field(ge=1)] | None = None
    """trust_region: importance ratios count at most this much, for samples of older weights; unset: no cap."""
    clip_low: Annotated[float, Field(gt=0, le=1)] | None = None
    """grpo_clip, cispo, gspo: ratios are clipped at 1 - clip_low."""
    clip_high: Annotated[float, Field(gt=0)] | None = None
    """grpo_clip, cispo, gspo: ratios are clipped at 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """grpo_clip: a negative advantage is multiplied by at most this ratio; unset: no bound."""
    args: dict[str, Any] = Field(default={})
    """module:function: keyword arguments for it."""
    denominator: Literal["tokens", "samples"] | None = None
    """Every token of the batch counts the same, or every sample; unset: samples for gspo, else tokens."""
    entropy_bonus: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the mean entropy, in nats."""
    kl_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL to the starting model; above 0, the trainer keeps a frozen copy of it."""

    @property
    def settings(self) -> dict[str, float | None]:
        """The settings of this type of loss, with its defaults where the run says nothing; none for a custom loss."""
        defaults = _SETTINGS.get(self.type, {})
        given = {name: getattr(self, name) for name in defaults}
        return {name: default if given[name] is None else given[name] for name, default in defaults.items()}

    @property
    def denominator_or_default(self) -> Literal["tokens", "samples"]:
        """The denominator of this type of loss."""
        return self.denominator or ("samples" if self.type == "gspo" else "tokens")

    @model_validator(mode="after")
    def _check_type(self) -> LossConfig:
        allowed = _SETTINGS.get(self.type, {})
        for name in sorted({name for settings in _SETTINGS.values() for name in settings}):
            if name not in allowed and getattr(self, name) is not None:
                raise ValueError(f"{name} has no effect with trainer.loss.type = {self.type!r}")
        if self.args and ":" not in self.type:
            raise ValueError(f"args has no effect with trainer.loss.type = {self.type!r}: it is for module:function")
        return self
