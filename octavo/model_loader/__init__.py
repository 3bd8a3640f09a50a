"""From a local path to a program and its weights. Knows checkpoints; knows no catalogue, no network and no kernels."""

from octavo.model_loader.load import LoadedModel, ModelInfo, inspect_model, load_model

__all__ = ["LoadedModel", "ModelInfo", "inspect_model", "load_model"]
