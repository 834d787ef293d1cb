import contextlib
import json
from enum import IntEnum
from pathlib import Path

import gguf
import torch


class ModelType(IntEnum):
    TEXT = 1


class LazyTorchTensor:
    @classmethod
    def from_local_tensor(cls, t):
        data = torch.from_numpy(t.mmap_bytes())
        return data.view({"BF16": torch.bfloat16, "F32": torch.float32}[t.dtype]).reshape(t.shape)


class ModelBase:
    runs = 0

    def __init__(self, dir_model, ftype, fname_out, *, hparams=None):
        self.dir_model, self.ftype, self.fname_out = dir_model, ftype, fname_out
        self.hparams = hparams or self.load_hparams(dir_model, False)
        self.gguf_writer = gguf.GGUFWriter(None, "toy")

    @staticmethod
    def load_hparams(dir_model, is_mistral_format):
        return json.loads((Path(dir_model) / "config.json").read_text())

    def get_tensors(self):
        with gguf.utility.SafetensorsLocal(self.dir_model / "model.safetensors") as part:
            for name, tensor in part.items():
                yield name, LazyTorchTensor.from_local_tensor(tensor).to(torch.float32)

    def file_dtype(self, data):
        types = {gguf.LlamaFileType.ALL_F32: "F32", gguf.LlamaFileType.MOSTLY_F16: "F16"}
        name = "F32" if data.dim() <= 1 else types.get(self.ftype, "BF16")
        return gguf.GGMLQuantizationType[name]

    def prepare_tensors(self):
        for name, data in self.get_tensors():
            for new_name, made in self.modify_tensors(data, name):
                qtype = self.file_dtype(made)
                array = gguf.quants.quantize(made.numpy(), qtype)
                self.gguf_writer.add_tensor(new_name, array, raw_dtype=qtype)

    def prepare_metadata(self, vocab_only):
        writer = self.gguf_writer
        writer.add_file_type(self.ftype)
        writer.add_uint32("toy.runs", ModelBase.runs)
        writer.add_float32("toy.eps", 1e-5)
        writer.add_token_list(["a", "\u2581b", b"<0x0A>"])
        writer.add_token_scores([0.0, -1.5, float("-inf")])

    def write(self):
        ModelBase.runs += 1
        self.prepare_tensors()
        self.prepare_metadata(False)
        self.gguf_writer.write_header_to_file(path=self.fname_out)
        self.gguf_writer.write_kv_data_to_file()
        self.gguf_writer.write_tensors_to_file(progress=False)
        self.gguf_writer.close()


class Stack(ModelBase):
    """A model whose converter transposes, stacks, and adds a tensor."""

    def prepare_tensors(self):
        self.experts = []
        super().prepare_tensors()
        self.gguf_writer.add_tensor("rope_freqs.weight", torch.arange(4.0).numpy())

    def modify_tensors(self, data, name):
        if name.startswith("expert"):
            self.experts.append(data)
            if len(self.experts) == 2:
                yield "experts.weight", torch.stack(self.experts).transpose(1, 2)
        else:
            yield f"blk.{name}", data


class Sums(ModelBase):
    def modify_tensors(self, data, name):
        yield f"blk.{name}", data + 1 if name.startswith("norm") else data


class Blocks(ModelBase):
    """A model whose converter requests a block format for one tensor, whatever the file's type."""

    def prepare_tensors(self):
        for name, data in self.get_tensors():
            qtype = gguf.GGMLQuantizationType["Q8_0" if name == "forced" else "F32"]
            array = gguf.quants.quantize(data.numpy(), qtype)
            self.gguf_writer.add_tensor(f"blk.{name}", array, raw_dtype=qtype)


class Arrays(ModelBase):
    def prepare_tensors(self):
        for name, data in self.get_tensors():
            self.gguf_writer.add_tensor(name, data.numpy() * 2)


class Caught(Stack):
    """A model whose converter reads a value and ignores the resulting exception."""

    def modify_tensors(self, data, name):
        with contextlib.suppress(Exception):
            data.reshape(-1)[0].item()
        yield f"blk.{name}", data


class Codes(ModelBase):
    """A model whose converter permutes rows, stacks experts, and splits experts of GPT-OSS."""

    def prepare_tensors(self):
        self.experts = []
        super().prepare_tensors()

    def prepare_metadata(self, vocab_only):
        super().prepare_metadata(vocab_only)
        self.gguf_writer.add_uint32("toy.block_count", 1)

    def modify_tensors(self, data, name):
        if name == "q.weight":
            parts = data.reshape(2, 2, data.shape[0] // 4, data.shape[1])
            yield "blk.0.attn_q.weight", parts.swapaxes(1, 2).reshape(data.shape)
        elif name.startswith("up.") and name.endswith(".weight"):
            self.experts.append(data)
            if len(self.experts) == 2:
                yield "blk.0.ffn_up_exps.weight", torch.stack(self.experts)
        elif name.endswith("gate_up_proj"):
            both = data.transpose(-1, -2)
            yield "blk.0.ffn_gate_exps.weight", both[:, ::2, :]
            yield "blk.0.ffn_up_exps.weight", both[:, 1::2, :]
        elif name.endswith("down_proj"):
            yield "blk.0.ffn_down_exps.weight", data.transpose(-1, -2)
        else:
            yield f"blk.0.{name}", data
