"""Patch sites of llama.cpp's converter, which is a folder, not an installed package."""

from __future__ import annotations

from loadstone._adapters.sites import Sites

_TABLE = """
conversion
    ModelType.TEXT
    call get_model_architecture(hparams, model_type)
    call get_model_class(name)
conversion.base
    call ModelBase.load_hparams(dir_model, is_mistral_format)
    ModelBase.__init__(self, dir_model, ftype, fname_out, hparams)
    call ModelBase.prepare_metadata(self, vocab_only)
    call ModelBase.write(self)
    LazyTorchTensor.from_local_tensor(t)
gguf
    LlamaFileType.GUESSED
    LlamaFileType.ALL_F32
    LlamaFileType.MOSTLY_F16
    LlamaFileType.MOSTLY_BF16
gguf.constants
    call GGUFValueType.get_type(val)
gguf.gguf_writer
    GGUFValue(value, type, sub_type)
    GGUFWriter.add_tensor_info(self, name, tensor_shape, tensor_dtype, tensor_nbytes, raw_dtype)
    GGUFWriter.write_header_to_file(self, path)
    GGUFWriter.write_kv_data_to_file(self)
    GGUFWriter.write_tensors_to_file(self, progress)
    TensorInfo(shape, dtype, nbytes, tensor)
gguf.lazy
    LazyNumpyTensor.astype(self, dtype)
    inherited LazyNumpyTensor._wrap_fn(fn, use_self, meta_noop)
    LazyNumpyTensor.meta_with_dtype_and_shape(dtype, shape)
gguf.utility
    SafetensorsLocal(filename)
"""


class ConverterSites(Sites):
    """The patch sites of one folder's converter; query it while the folder's modules are imported.

    Args:
        release: the folder's version, in words.
        folder: path of the converter.
    """

    otherwise = "write the file with the library's own script"

    def __init__(self, release: str, folder: str) -> None:
        super().__init__("llama.cpp", "gguf 0.19, of llama-cpp-python 0.3.36", _TABLE)
        self.release = release
        self.folder = folder

    def version(self) -> str:
        """Return the release of the converter's ``gguf`` package: the converter has no version."""
        return self.release
