// Lists every code that loadstone reports. A test checks that the list is sorted and complete.
#include <algorithm>
#include <array>

#include "base/codes_from_plan.h"
#include "loadstone/error.h"

namespace loadstone {

static constexpr auto codes_to_open = std::to_array<CodeInfo>({
    {"audit.on_meta", "A tensor has no memory, and no rule excludes it.",
     "Load the model again. If the tensor still has no memory, the findings of the plan name the "
     "missing source."},
    {"audit.unaccounted", "A tensor has a value of unknown origin.",
     "Find the code that wrote the tensor after the load, or load the tensor through loadstone."},
    {"cancelled", "The caller stopped the operation before it finished.",
     "A stopped conversion continues with --resume. A stopped load into an existing model may have "
     "changed some of its tensors; every other operation has no effect."},
    {"convert.activations",
     "The output quantizes activations or the KV cache differently than the source.",
     "If only the weights are quantized, no action is needed. If your server quantizes activations "
     "too, use the source."},
    {"convert.architecture",
     "A GGUF output has no general.architecture, or keeps names of tensors that llama.cpp or "
     "ComfyUI does not read, such as those of transformers and diffusers.",
     "For llama.cpp, use its own converter: python -m loadstone convert MODEL OUT.gguf --converter "
     "LLAMA_CPP_FOLDER. For ComfyUI, convert the model's original checkpoint, and set --arch if "
     "loadstone does not recognise the model."},
    {"convert.complete",
     "An earlier run of the same conversion finished the target, and nothing has changed since.",
     "No action is needed. To convert again, run without --resume, --part and --finish."},
    {"convert.config_stays", "A config or tokenizer file at the target differs from the source's.",
     "Remove the file at the target, or replace it with the source's: libraries read it together "
     "with the output."},
    {"convert.constants", "Recipes contain tensors that were computed for a different checkpoint.",
     "Make the recipes again from the checkpoint that you convert."},
    {"convert.decoded",
     "The conversion quantizes some tensors, or merges, and therefore decodes tensors that are "
     "quantized in the source. The output stores their values.",
     "To keep codes, choose the same encoding for these tensors too (--quantize PATTERN=ENCODING). "
     "To quantize the result of a merge, pass --quantize."},
    {"convert.dims", "A tensor has more dimensions than readers of the output format support.",
     "Allow such tensors with --beyond-ggml, or reshape the tensor with a rule."},
    {"convert.extra", "A companion file (config, tokenizer) cannot be copied or written.",
     "The message names the file. Replace a link with the file itself: loadstone copies only "
     "regular files."},
    {"convert.fallback", "Some tensors get a different type than requested.",
     "No action is needed: rows of these tensors do not consist of whole blocks of the requested "
     "type, and llama.cpp chooses the same types."},
    {"convert.importance", "An importance matrix does not fit the tensors to quantize.",
     "The message names the tensors and entries. Use the matrix that was measured with this "
     "model."},
    {"convert.incomplete", "Parts of a conversion have not run, or their shards are incomplete.",
     "Run the parts that the message names again, then run the conversion with --finish."},
    {"convert.left_alone",
     "Selected tensors stay unchanged: their rows are not whole blocks of the encoding, their kind "
     "is not quantized by default (embeddings, heads, norms), or they are codes, which --dtype "
     "does not decode.",
     "Choose a different encoding for them (--quantize PATTERN=ENCODING), select them with "
     "--include, or exclude them with --exclude. To decode codes, pass --dequantize."},
    {"convert.lists", "A config lists modules under names that the output does not have.",
     "Rename the config's entries as the tensors were renamed: readers use these lists to decide "
     "how to treat a module."},
    {"convert.locked",
     "Another process is working on the same conversion, or on the same part of it.",
     "Wait until the other process ends, or stop it."},
    {"convert.lossy",
     "A value would change, but --style only moves codes, or --require-lossless forbids any "
     "change.",
     "To allow the change, omit --require-lossless, or replace --style by --quantize (encodes "
     "again) or --dequantize (decodes). Otherwise exclude the tensors (--exclude). "
     "docs/lossless.md lists the pairs of encodings that keep all values."},
    {"convert.metadata",
     "The output cannot store some metadata of the source (arrays, long strings), or a GGUF output "
     "lacks the tokenizer, without which llama.cpp does not load it.",
     "For llama.cpp, use its own converter (--converter), or add the keys (--metadata FILE). Next "
     "to a safetensors output, put tokenizer.json or tokenizer.model of the original model."},
    {"convert.metadata_json", "A metadata file (--metadata) is invalid.",
     "Correct the file at the place in the message; docs/formats/gguf.md describes its format."},
    {"convert.name", "The output format cannot store a tensor's name.",
     "Rename the tensor with a rule."},
    {"convert.not_copied",
     "A file of the source folder is not copied: Python code, weights in a different format, an "
     "adapter, a file of more than 1 GiB, or a link that leaves the folder.",
     "Copy the file yourself if a program needs it. --copy-code copies Python code."},
    {"convert.overflow",
     "Finite values are too large for their new dtype or for the scale of their block: F16, which "
     "GGUF uses for scales, ends at 65504.",
     "Choose a wider dtype (--dtype bfloat16 or float32) or a different encoding. If a scale in "
     "the source is wrong, correct it. --allow-non-finite writes such values as infinity or NaN."},
    {"convert.readers",
     "transformers does not read quantized tensors in the style modelopt, and other libraries read "
     "codes only from a folder with a config.json.",
     "For transformers, pass a folder as the target and --style compressed-tensors. For loadstone "
     "and servers that read ModelOpt's files, no action is needed. docs/opens-where.md lists the "
     "readers of each style."},
    {"convert.redone",
     "A shard that an earlier run finished, or the shard's source, has changed since then.",
     "No action is needed: loadstone writes the shard again. If you did not expect the change, "
     "find the program that made it."},
    {"convert.replaced", "The conversion replaces files of an earlier output.",
     "To keep the earlier output, choose a different target."},
    {"convert.requantized",
     "Tensors that are quantized in the source get new codes. \"exact\" keeps all values; "
     "otherwise the message has the size of the second rounding error.",
     "If there is an unquantized original, convert it instead. To stop if a value would change, "
     "pass --require-lossless."},
    {"convert.resumed", "The message specifies which work of an earlier run --resume keeps.",
     "No action is needed."},
    {"convert.rounded",
     "--style keeps all codes, but F32 has no exact inverse of some global scales, so the output "
     "stores the nearest one. The message has the largest relative change of a scale.",
     "No action is needed for inference. To stop if a value would change, pass "
     "--require-lossless."},
    {"convert.state",
     "Files that an earlier run left next to the target belong to a different conversion.",
     "Run the conversion with the options and the source of the earlier run, or remove the file or "
     "folder that the message names."},
    {"convert.target",
     "The target is the source, contains another model, or has the suffix of a format that "
     "loadstone does not write.",
     "Check that SOURCE comes before TARGET. Choose a folder, or a name that ends in .safetensors "
     "or .gguf. --overwrite replaces files of the output's names."},
    {"convert.traced",
     "A GGUF output has names, layouts and keys by rules that loadstone traced from a release of "
     "llama.cpp's converter.",
     "No action is needed. To use a different release, pass its folder (--converter)."},
    {"convert.underflow",
     "Blocks of small values became 0, because the scales of their encoding (F16 in GGUF, F8_E4M3 "
     "in nvfp4) cannot be small enough.",
     "Exclude the tensors that the message names (--exclude), or choose an encoding with F32 "
     "scales, such as int8-channel or fp8-channel."},
    {"convert.unread",
     "A library or server would misread or reject some tensors: their layers are not linear, "
     "layers that it joins (q, k and v; gate and up; experts) have different encodings, or it has "
     "no reader for the encoding.",
     "Follow the advice in the message: give joined layers one encoding (--quantize "
     "PATTERN=ENCODING), or choose an encoding or a style that these readers support "
     "(docs/opens-where.md). If the tensors do not belong to linear layers, exclude them "
     "(--exclude). loadstone reads all of them."},
    {"dcp.chunk_bounds", "A chunk of a DCP checkpoint exceeds its tensor.",
     "The checkpoint's metadata is inconsistent; save the checkpoint again with the program that "
     "wrote it."},
    {"dcp.dtype",
     "A dtype of a DCP checkpoint is unknown, or an item has a different dtype than the metadata "
     "declares.",
     "Save the checkpoint again, with a dtype that loadstone reads."},
    {"dcp.duplicate", "A DCP checkpoint lists a tensor or a chunk twice.",
     "The checkpoint's metadata is inconsistent; save the checkpoint again with the program that "
     "wrote it."},
    {"dcp.hole", "Some elements of a tensor are in no chunk of the DCP checkpoint.",
     "A rank did not save its part. Save the checkpoint again with all ranks."},
    {"dcp.ignored", "loadstone does not read objects of a DCP checkpoint that are not tensors.",
     "If you do not need these objects, no action is needed. Outputs lack them, including extra "
     "state and tuples of tensors."},
    {"dcp.item", "An item of a DCP checkpoint differs from the chunk that the metadata declares.",
     "Check that all files belong to one checkpoint: files of two checkpoints may be mixed."},
    {"dcp.item_bounds", "An item of a DCP checkpoint extends beyond the end of its file.",
     "The file is truncated, or belongs to a different checkpoint. Copy or download it again."},
    {"dcp.item_missing", "A DCP checkpoint does not specify where a chunk is stored.",
     "The checkpoint's metadata is damaged; save the checkpoint again."},
    {"dcp.item_overlap", "Two items of a DCP checkpoint share bytes.",
     "The checkpoint's metadata is inconsistent; save the checkpoint again with the program that "
     "wrote it."},
    {"dcp.metadata", "The .metadata file of a DCP checkpoint does not have torch's format.",
     "Save the checkpoint with torch.distributed.checkpoint and its default planner; other "
     "planners may write other formats."},
    {"dcp.overlap", "Two chunks of a DCP checkpoint contain the same elements of a tensor.",
     "The checkpoint's metadata is inconsistent; save the checkpoint again with the program that "
     "wrote it."},
    {"dcp.transform", "Items of a DCP checkpoint are compressed or transformed.",
     "Save the checkpoint without stream extensions."},
    {"dcp.unsupported", "loadstone does not read this kind of tensor of a DCP checkpoint.",
     "Convert the checkpoint to one file with torch's dcp_to_torch_save. The message names the "
     "kind of tensor."},
    {"dcp.unused", "A DCP checkpoint stores items of tensors that its metadata does not list.",
     "No action is needed: loadstone does not read these items."},
    {"device.driver", "The driver of a device is unusable, or one of its functions failed.",
     "Check that other programs can use the device. The message contains the driver's error."},
    {"format.adapter",
     "An adapter's files are malformed, contradict each other, or contain an unsupported kind of "
     "adapter.",
     "Save the adapter again with the library that trained it. The message names the field or the "
     "tensors."},
    {"format.config", "A config file is empty, or is not valid JSON for Python's json module.",
     "Correct the file at the byte that the message names, or download it again."},
    {"format.ignored", "A folder contains more weights than loadstone reads.",
     "To load the other weights, pass their file, a pattern or a list of files."},
    {"format.no_checkpoint",
     "The path contains no checkpoint, or several, and loadstone cannot choose one.",
     "Pass the file, the index or a pattern. For a diffusers pipeline, pass one of its folders."},
    {"format.unknown", "loadstone does not support the file's format.",
     "Check that the file is a checkpoint: loadstone recognises formats by their content and by "
     "the file's name."},
    {"gg.alignment", "general.alignment is not a power of two in the usual range.",
     "The program that wrote the file has a bug: use a newer version of it, or another copy of the "
     "file."},
    {"gg.array_len", "An array in the metadata is longer than the file.",
     "Download the file again, or ask its author for a sound copy."},
    {"gg.block", "A tensor's first dimension is not a multiple of the block size of its type.",
     "The program that wrote the file has a bug: use a newer version of it, or another copy of the "
     "file."},
    {"gg.bool", "A boolean in the metadata is neither 0 nor 1.",
     "The program that wrote the file has a bug: use a newer version of it, or another copy of the "
     "file."},
    {"gg.count", "The header declares more tensors or metadata entries than fit in the file.",
     "Download the file again, or ask its author for a sound copy."},
    {"gg.dims", "A dimension of a tensor is negative or 0.",
     "A tensor with a dimension of 0 is still loaded. If a dimension is negative, save the file "
     "again with the program that wrote it."},
    {"gg.duplicate", "A metadata key or a tensor's name occurs twice.",
     "Save the file again with each name once: programs differ in which of the two they read."},
    {"gg.endian", "The file is big-endian.",
     "Convert the file to little-endian with the gguf package (gguf_convert_endian.py)."},
    {"gg.file_too_small", "The file is empty.", "Download the file again."},
    {"gg.hole", "Bytes between two tensors belong to no tensor.",
     "loadstone still loads the file, but ggml rejects it. For ggml, save it again with the "
     "program that wrote it."},
    {"gg.key", "A metadata key is empty, not ASCII, or longer than 65535 bytes.",
     "The program that wrote the file has a bug: use a newer version of it, or another copy of the "
     "file."},
    {"gg.kv_type", "The type of a metadata value is unknown, or wrong for its key.",
     "The program that wrote the file has a bug: use a newer version of it, or another copy of the "
     "file."},
    {"gg.legacy", "The file has a format that ggml used before GGUF.",
     "Convert the file with a version of llama.cpp that still reads the old format, or download a "
     "GGUF file of the model."},
    {"gg.lfs_pointer", "The file is a git-lfs pointer.",
     "Run git lfs pull, or download the file itself."},
    {"gg.magic", "The file does not begin with GGUF.",
     "Check that the path names a GGUF file. The message describes what the file contains."},
    {"gg.n_dims", "A tensor has no dimensions, or more than 4.",
     "To load a tensor with more than 4 dimensions, raise --gguf-rank-max, or write the file with "
     "loadstone: it declares its number of dimensions. Tensors without dimensions are loaded."},
    {"gg.name", "A tensor's name contains a NUL, is empty, or is too long for ggml.",
     "The program that wrote the file has a bug: use a newer version of it, or another copy of the "
     "file."},
    {"gg.nested_array", "The metadata contains an array of arrays.",
     "No action is needed for one level of nesting. If the file is rejected for deeper nesting, "
     "save it without such arrays."},
    {"gg.no_dequant",
     "The tensor has a type for activations (Q8_1, Q8_K), which cannot be dequantized.",
     "Quantize the tensor to a type for weights."},
    {"gg.offset", "A tensor's offset is not a multiple of the alignment.",
     "The program that wrote the file has a bug: use a newer version of it, or another copy of the "
     "file."},
    {"gg.overflow", "A tensor's size in bytes does not fit in 63 bits.",
     "The shape in the header is wrong. Download the file again, or ask its author for a sound "
     "copy."},
    {"gg.overlap", "Two tensors share bytes.",
     "The offsets are wrong; save the file again with the program that wrote it."},
    {"gg.scale_nan", "The scale of a block is NaN or infinite, so its values are too.",
     "The tensor was quantized from NaN or infinite values, or is damaged. Download it again, or "
     "quantize it again from sound values."},
    {"gg.split", "A part of a split GGUF file is missing, or the parts do not belong together.",
     "Put all parts into one folder under their original names. For metadata keys that differ, the "
     "first part is used."},
    {"gg.string_len", "A string is longer than the file.",
     "Download the file again, or ask its author for a sound copy."},
    {"gg.trailing", "The file has bytes after the last tensor.",
     "loadstone still loads the file. To be sure that it is sound, compare it with the original."},
    {"gg.truncated", "The file ends too early.",
     "The file was not downloaded or copied completely; download it again."},
    {"gg.type", "A tensor's type is unknown, or was removed from the format.",
     "Convert the file to a current type, with a version of llama.cpp that supports this one."},
    {"gg.utf8", "A text in the file is not UTF-8.",
     "loadstone rejects the file if the text is a tensor's name: save the file again with valid "
     "names. loadstone still loads the file if the text is metadata."},
    {"gg.version", "The GGUF version of the file is neither 2 nor 3.",
     "Convert the model again with a current version of the program that wrote the file."},
    {"im.count", "A count in an importance matrix is negative, or too large for the file.",
     "Make a new importance matrix with llama-imatrix."},
    {"im.dtype", "Sums or counts of an importance matrix are not F32.",
     "Make the importance matrix again with llama-imatrix."},
    {"im.duplicate", "An importance matrix has two entries with the same name.",
     "Make the importance matrix again with llama-imatrix."},
    {"im.empty", "An importance matrix has no entries.",
     "Check that llama-imatrix wrote the file, and that the file is not a model."},
    {"im.metadata",
     "A required key of an importance matrix is missing, or its value has the wrong type.",
     "Check that llama-imatrix wrote the file, and that the file is not a model."},
    {"im.name", "The name of an entry of an importance matrix is not a valid tensor name.",
     "Make the importance matrix again with llama-imatrix."},
    {"im.pair", "An entry of an importance matrix has sums without counts, or counts without sums.",
     "Make the importance matrix again with llama-imatrix."},
    {"im.shape", "The shapes of sums and counts in an importance matrix do not fit each other.",
     "Make the importance matrix again with llama-imatrix."},
    {"im.trailing", "The file has bytes after the end of the importance matrix.",
     "Copy or download the file again."},
    {"im.truncated", "An importance matrix ends too early.",
     "The file was not copied or downloaded completely; copy or download it again."},
    {"im.value", "A value of an importance matrix is negative, NaN or infinite.",
     "Measure the importance matrix again: a single bad text in the dataset can cause this."},
    {"internal", "loadstone has a bug.", "Please report the bug with this message."},
    {"io.changed", "A file has changed since loadstone opened it, or since the plan was made.",
     "Do not change the checkpoint while it is in use. If you use a saved plan, make it again or, "
     "if the checkpoint was moved, pass the new folder."},
    {"io.denied", "The system or a host denies access to a file or folder.",
     "Check the permissions of the file and of the folders above it. For a file on a host, the "
     "message names the token or the keys that the host needs."},
    {"io.exists", "A document (a plan, receipt or page) would replace a file of a model.",
     "Choose a new file name."},
    {"io.no_space", "The disk has too little space, or a quota or file-size limit was reached.",
     "Free space on the disk of the target folder, raise the limit, or choose a different target."},
    {"io.not_found", "A file or folder does not exist.",
     "Check the path. Quote a pattern, so that the shell does not expand it."},
    {"io.not_regular",
     "The path is a folder, named pipe, socket or device instead of a regular file.",
     "Pass the path of a regular file."},
    {"io.open", "The system cannot open a file.",
     "Check the path and its permissions. The message contains the system's reason."},
    {"io.read", "The system cannot read a file.",
     "Check the disk or the network. The message contains the system's reason."},
    {"io.redirect", "A host redirects to a URL that loadstone does not follow.",
     "Pass the final URL. loadstone does not follow redirects from https to http, or from public "
     "to private hosts."},
    {"io.remote", "A host cannot be reached, or its response is invalid.",
     "The message contains the host's response; docs/remote.md lists the requirements for "
     "servers."},
    {"io.short_read", "A file ended before all the bytes that its header declares.",
     "The file was shortened while loadstone read it. Download or copy it again."},
    {"io.time",
     "A shard has a different modification time than planned, but the same size and header.",
     "If the checkpoint was only copied, no action is needed. If its values may have changed, make "
     "the plan again."},
    {"io.tls", "A host's certificate is not trusted.",
     "Pass the file with your certificate authorities (--ca-file, SSL_CERT_FILE). loadstone always "
     "verifies certificates."},
    {"io.write", "The system cannot write a file.",
     "Check the target folder: its permissions, free space and disk. The message contains the "
     "system's reason."},
    {"ix.duplicate",
     "A tensor is in two shards and the index does not select one of them, or the index lists the "
     "tensor twice.",
     "Remove one of the two: programs differ in which one they read."},
    {"ix.gap", "The files are numbered, and a number is missing among the files that were passed.",
     "Pass all the files or their folder. If you pass an index, check that it belongs to these "
     "shards."},
    {"ix.json", "The index is not valid JSON.", "Download the index again."},
    {"ix.metadata", "Files of one checkpoint have different values for a metadata key.",
     "The value of the first file is used. If it is wrong, save the files again with equal "
     "metadata."},
    {"ix.missing_shard",
     "A shard is missing that the index or the numbers in the file names declare.",
     "Download the missing shard."},
    {"ix.not_regular", "A file of the checkpoint is a folder, named pipe, socket or device.",
     "Replace it with a regular file: download the checkpoint again."},
    {"ix.path", "A shard's name in the index is not a valid file name.",
     "Download the index again, or ask its author for a sound copy."},
    {"ix.path_escape", "A shard's name or a link leads out of the checkpoint's folder.",
     "If you made the links yourself, allow them (--allow-links, allow_links=). Otherwise download "
     "the checkpoint again from a source that you trust."},
    {"ix.replaced", "Several shards contain a tensor, and the index selects one of them.",
     "No action is needed: loadstone reads the shard that the message names."},
    {"ix.tensor_missing", "The index maps a tensor to a shard that does not contain it.",
     "The index and the shards may belong to different revisions; download all of them again."},
    {"ix.total_size", "metadata.total_size in the index is not the sum of the tensors' bytes.",
     "The checkpoint is still loaded. The index and the shards may belong to different revisions; "
     "to be sure, download all of them again."},
    {"ix.unlisted", "A shard contains a tensor that the index does not list.",
     "The checkpoint is still loaded. The index and the shards may belong to different revisions; "
     "to be sure, download all of them again."},
    {"ix.weight_map",
     "weight_map in the index is missing, empty, or not an object whose values are strings.",
     "Download the index again, or save the checkpoint again."},
    {"memory.device", "A device has less free memory than the load needs.",
     "Use a device map with max_memory, or a dtype with fewer bytes."},
    {"memory.host", "The machine has less free memory than the load needs.",
     "Use a device map that places modules on \"disk\", or a dtype with fewer bytes."},
    {"merge.adapter", "An adapter does not fit the base model.",
     "Merge the adapter into the model that it was trained for ('loadstone merge BASE --lora "
     "ADAPTER -o TARGET'). The message names its tensors."},
    {"merge.models",
     "The models to merge have different tensors, shapes, configs or companion files.",
     "Merge only models of the same architecture, with the same tensor names and shapes. The "
     "output gets the first model's companion files."},
    {"merge.tie", "Adapters change some names of a tied tensor, but not the others.",
     "The other names keep the value of the base model. To change all of them, use tie=keep."},
    {"merge.unused", "A tensor of an adapter would have no effect on the base model.",
     "If the tensor belongs to another model, exclude it with a pattern. If not, check that the "
     "base is the model that the adapter was trained for."},
    {"offload.index", "The offload folder has an invalid index.json.",
     "Move the index.json elsewhere, or choose another offload folder."},
    {"offload.name", "An offloaded tensor's name is not a valid file name.",
     "Keep the tensor in memory, or rename it."},
    {"open.closed", "A tensor was requested from a closed checkpoint.",
     "Read the tensors inside the `with` block, or open the checkpoint again."},
    {"open.index", "An index is out of range for the tensor, or the slice is not supported.",
     "Compare the index with the tensor's shape. The step of a slice must be 1 or more."},
    {"open.name", "The checkpoint has no tensor with that name.",
     "Use one of the similar names in the message; keys() lists all names."},
});

static constexpr auto known_codes = [] {
  std::array<CodeInfo, codes_to_open.size() + codes_from_plan.size()> all;
  std::ranges::copy(codes_from_plan, std::ranges::copy(codes_to_open, all.begin()).out);
  return all;
}();

std::span<const CodeInfo> all_codes() noexcept { return known_codes; }

}  // namespace loadstone
