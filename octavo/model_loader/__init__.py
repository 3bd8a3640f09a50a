"""From a local path to a program and its weights. Knows checkpoints; knows no catalogue, no network and no kernels."""

from octavo.model_loader.load import LoadedModel, ModelFacts, ModelOutline, inspect_model, load_model, outline_model

__all__ = ["LoadedModel", "ModelFacts", "ModelOutline", "inspect_model", "load_model", "outline_model"]
