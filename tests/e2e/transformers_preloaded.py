"""Imports and patterns for ranks with models of transformers, made once: a rank is forked afterwards."""

from transformers import masking_utils, optimization
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.mixtral import modeling_mixtral

__all__ = ("masking_utils", "modeling_gpt2", "modeling_mixtral", "optimization")

get_checkpoint_conversion_mapping("gpt2")  # compiles the patterns for the names of all architectures, and keeps them
