"""A small stand-in for llama.cpp's converter, with the functions that loadstone hooks."""

from . import base
from .base import LazyTorchTensor, ModelBase, ModelType

__all__ = ["LazyTorchTensor", "ModelBase", "ModelType", "get_model_architecture", "get_model_class"]


def get_model_architecture(hparams, model_type):
    return hparams["architectures"][0]


def get_model_class(name, mmproj=False):
    return vars(base)[name]
