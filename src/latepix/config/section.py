"""The base of every group of settings."""

from __future__ import annotations

from pydantic import ConfigDict
from pydantic_config import BaseConfig


class Section(BaseConfig):
    """A frozen group of settings that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
