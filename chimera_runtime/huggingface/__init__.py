"""Models of the transformers library as layers of a pipeline: `layers`, which needs no code for a model."""

from chimera_runtime.huggingface.layers import TransformerLayers, layers

__all__ = ["TransformerLayers", "layers"]
