#include "catalog/open_dcp.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "base/text.h"
#include "catalog/for_each_file.h"
#include "catalog/index_check.h"
#include "catalog/paths.h"
#include "formats/dcp_metadata.h"
#include "formats/safetensors.h"
#include "formats/sniff.h"
#include "formats/torch.h"
#include "formats/zip_directory.h"
#include "loadstone/name_hash.h"

namespace loadstone {

namespace {

// Presents a byte range of a file as a separate file. Thread-safe if the file is thread-safe.
class FilePart final : public ByteSource {
 public:
  FilePart(ByteSource& file, const FileIdentity& identity, std::uint64_t begin, std::uint64_t bytes)
      : file_(file), identity_(identity), begin_(begin) {
    identity_.bytes = bytes;
  }

  [[nodiscard]] const std::string& path() const noexcept override { return file_.path(); }
  [[nodiscard]] FileIdentity identity() const override { return identity_; }
  using ByteSource::read;
  void read(std::uint64_t offset, std::span<const std::span<std::byte>> pieces) override {
    file_.read(begin_ + offset, pieces);
  }

 private:
  ByteSource& file_;
  FileIdentity identity_;
  std::uint64_t begin_;
};

// Maximum number of objects that holds_tensors() opens, because an optimizer has many objects, and
// each takes a few reads.
constexpr std::size_t objects_max = 1024;

// Rethrows the error for a tensor's item, with an offset from the start of its file.
[[noreturn]] void rethrow_as_item(const Error& error, const std::string& tensor,
                                  std::uint64_t item_begin) {
  Where where = error.where();
  where.tensor = tensor;
  if (where.byte_offset) *where.byte_offset += item_begin;
  throw Error(error.code(), error.message() + " (an item of a DCP checkpoint)", std::move(where));
}

// Not thread-safe; used once.
class DcpFolder {
 public:
  DcpFolder(const FileOpener& opener, const std::string& path)
      : opener_(opener), path_(path), folder_(parent_path(path)) {}

  DcpCheckpoint read() {
    const auto source = opener_.open(path_, folder_);
    header_.shard.path = path_;
    header_.shard.format = FileFormat::dcp;
    header_.shard.identity = source->identity();
    note_reads(*source, header_.shard);
    metadata_ = read_dcp_metadata(*source);
    header_.shard.data_begin = header_.shard.identity.bytes;
    header_.shard.header_digest = header_digest(*source, header_.shard);
    open_files();
    require_apart();
    sort_tensors();
    for (const DcpTensor& tensor : metadata_.tensors) add(tensor);
    header_.findings = std::move(metadata_.findings);
    tell_ignored();
    header_.shard.identity = assembled_identity(header_.shard.identity, *assembly_);
    return {std::move(header_), std::move(assembly_)};
  }

 private:
  struct File {
    std::shared_ptr<ByteSource> source;
    FileIdentity identity;
    bool is_safetensors = false;
    std::vector<TensorInfo> tensors;  // of safetensors
    NameMap<std::size_t> names;
  };

  // Opens the files that contain parts of tensors.
  void open_files() {
    files_.resize(metadata_.files.size());
    for_each_file(opener_.storage, files_.size(), header_.shard.reads_at_once,
                  [&](std::size_t i) { open_file(metadata_.files[i], files_[i]); });
    std::vector<std::string> missing;
    for (std::size_t i = 0; i < files_.size(); ++i) {
      const File& file = files_[i];
      if (file.source == nullptr) {
        missing.push_back(metadata_.files[i]);
      } else {
        assembly_->files.push_back({file.source->path(), file.identity});
      }
    }
    if (missing.empty()) return;
    const bool is_one = missing.size() == 1;
    refuse(path_, {"ix.missing_shard",
                   is_one ? "a file named in the metadata is missing"
                          : "files named in the metadata are missing",
                   "relative_path", no_files_text(missing),
                   is_one ? "the file next to .metadata" : "the files next to .metadata"});
  }

  // Leaves the source null if the file does not exist.
  void open_file(const std::string& name, File& file) const {
    try {
      file.source = opener_.open(join_path(folder_, name), folder_);
    } catch (const Error& error) {
      if (error.code() != "io.not_found") throw;
      return;
    }
    file.identity = file.source->identity();
    file.is_safetensors = file.identity.bytes > 0 && sniff(*file.source) == FileKind::safetensors;
    if (file.is_safetensors) read_names(file);
  }

  // Reads the header of a file that DCP wrote with SerializationFormat.SAFETENSORS. DCP's metadata
  // does not contain the offsets of tensors in such a file.
  static void read_names(File& file) {
    file.tensors = read_safetensors(*file.source).tensors;
    for (std::size_t i = 0; i < file.tensors.size(); ++i) {
      file.names.emplace(file.tensors[i].name, i);
    }
  }

  // Requires that no items overlap, because many tensors that refer to one item could require an
  // arbitrary amount of memory.
  void require_apart() const {
    using Range = std::tuple<std::uint32_t, std::uint64_t, std::uint64_t, const DcpTensor*>;
    std::vector<Range> ranges;
    for (const DcpTensor& tensor : metadata_.tensors) {
      std::set<std::uint32_t> named;  // safetensors files, each with one chunk of the tensor
      for (const DcpChunk& chunk : tensor.chunks) {
        const File& file = files_[chunk.file];
        if (file.is_safetensors && !named.insert(chunk.file).second) {
          refuse(file.source->path(),
                 {"dcp.item_overlap",
                  "the metadata assigns two chunks of a tensor to the same safetensors file",
                  "relative_path", "a second chunk", "one"},
                 tensor.name);
        }
        if (file.is_safetensors) continue;
        const std::uint64_t bytes = file.identity.bytes;
        if (chunk.item_begin > bytes || chunk.item_bytes > bytes - chunk.item_begin) {
          refuse(file.source->path(),
                 {"dcp.item_bounds", "an item exceeds its file", "length",
                  fmt::format("{} at {}", bytes_text(chunk.item_bytes), chunk.item_begin),
                  "a part of " + bytes_text(bytes)},
                 tensor.name);
        }
        ranges.emplace_back(chunk.file, chunk.item_begin, chunk.item_begin + chunk.item_bytes,
                            &tensor);
      }
    }
    std::ranges::sort(ranges);
    for (std::size_t i = 1; i < ranges.size(); ++i) {
      const auto& [file, begin, end, tensor] = ranges[i];
      const auto& [other, other_begin, other_end, other_tensor] = ranges[i - 1];
      if (file != other || begin >= other_end) continue;
      refuse(files_[file].source->path(),
             {"dcp.item_overlap", "two items share bytes of the same file", "offset",
              fmt::format("[{}, {}) and [{}, {})", other_begin, other_end, begin, end),
              "an item for each chunk"},
             tensor->name);
    }
  }

  // Sorts tensors by their first byte, so that reading them in order reads each file from start to
  // end.
  void sort_tensors() {
    const auto place = [](const DcpTensor& tensor) {
      std::pair<std::uint32_t, std::uint64_t> first = {UINT32_MAX, UINT64_MAX};
      for (const DcpChunk& chunk : tensor.chunks) {
        first = std::min(first, {chunk.file, chunk.item_begin});
      }
      return first;
    };
    std::ranges::stable_sort(metadata_.tensors, {}, place);
    next_ = header_.shard.data_begin;
  }

  void add(const DcpTensor& tensor) {
    TensorInfo info;
    info.name = tensor.name;
    info.encoding = tensor.dtype;
    info.shape = tensor.shape;
    std::uint64_t bytes = info.encoding.byte_count(tensor.shape.numel().value_or(0)).value_or(0);
    const auto chunk_begin = static_cast<std::uint32_t>(assembly_->chunks.size());
    for (const DcpChunk& chunk : tensor.chunks) {
      const TensorInfo item = read_item(tensor, chunk);
      if (!item.strides.empty()) {
        take_strides(tensor, item, info);
        bytes = item.byte_count();
        assembly_->chunks.push_back(
            {.file = chunk.file, .file_begin = item.offset_begin, .run_bytes = bytes});
      } else {
        assembly_->chunks.push_back(chunk_of(tensor, chunk, item.offset_begin));
      }
    }
    info.offset_begin = next_;
    next_ += bytes;  // cannot overflow, because items do not share bytes of the files
    info.offset_end = next_;
    if (bytes > 0) {
      assembly_->tensors.push_back(
          {.begin = info.offset_begin,
           .end = info.offset_end,
           .chunk_begin = chunk_begin,
           .chunk_end = static_cast<std::uint32_t>(assembly_->chunks.size())});
    }
    header_.tensors.push_back(std::move(info));
  }

  // Copies the strides of an item that is the whole tensor. Throws Error for a strided part.
  void take_strides(const DcpTensor& tensor, const TensorInfo& item, TensorInfo& info) const {
    const std::uint64_t bytes =
        info.encoding.byte_count(tensor.shape.numel().value_or(0)).value_or(0);
    if (tensor.chunks.size() > 1 || item.byte_count() != bytes) {
      refuse(path_,
             {"dcp.unsupported", "a chunk is not contiguous", "stride", Shape(item.strides).text(),
              "contiguous chunks, as DTensor and FSDP2 save them"},
             tensor.name);
    }
    info.strides = item.strides;
  }

  [[nodiscard]] TensorInfo read_item(const DcpTensor& tensor, const DcpChunk& chunk) const {
    const File& file = files_[chunk.file];
    TensorInfo item =
        file.is_safetensors ? named_item(file, tensor) : saved_item(file, tensor, chunk);
    const auto require = [&](bool fits, const char* code, const char* field, std::string found,
                             std::string expected) {
      if (fits) return;
      refuse(file.source->path(),
             {code, "an item differs from the metadata", field, std::move(found),
              std::move(expected), chunk.item_begin},
             tensor.name);
    };
    require(item.encoding == Encoding(tensor.dtype), "dcp.dtype", "dtype",
            std::string(item.encoding.name()), std::string(name(tensor.dtype)));
    require(item.shape == chunk.sizes, "dcp.item", "size", item.shape.text(), chunk.sizes.text());
    return item;
  }

  static TensorInfo named_item(const File& file, const DcpTensor& tensor) {
    const auto found = file.names.find(tensor.name);
    if (found != file.names.end()) return file.tensors[found->second];
    refuse(file.source->path(),
           {"dcp.item", "the file does not contain the tensor", "header", "no tensor of this name",
            "the chunk that the metadata assigns to this file"},
           tensor.name);
  }

  // Returns true if the object contains tensors. torch.save wrote these tensors as part of the
  // object, because DCP does not split tuples.
  [[nodiscard]] bool holds_tensors(const DcpObject& object) const {
    const auto name = std::ranges::find(metadata_.files, object.file);
    if (name == metadata_.files.end()) return false;
    const File& file = files_[static_cast<std::size_t>(name - metadata_.files.begin())];
    const std::uint64_t bytes = file.identity.bytes;
    if (object.item_begin > bytes || object.item_bytes > bytes - object.item_begin) return false;
    FilePart part(*file.source, file.identity, object.item_begin, object.item_bytes);
    try {
      return std::ranges::any_of(read_zip_directory(part).records, [](const ZipRecord& record) {
        return record.name.find("/data/") != std::string::npos;
      });
    } catch (const Error& error) {
      if (error.code().starts_with("io.")) throw;
      return false;  // not an archive
    }
  }

  // Adds a finding that names every object that is not read. Its `sources` are only extra states
  // and objects that contain tensors, because a conversion would lose them.
  void tell_ignored() {
    if (metadata_.objects.empty()) return;
    std::vector<std::string> states;
    std::vector<std::string> holders;
    std::vector<std::string> others;
    for (const DcpObject& object : metadata_.objects) {
      if (is_extra_state(object.name)) {
        states.push_back(object.name);
      } else if (states.size() + holders.size() + others.size() < objects_max &&
                 holds_tensors(object)) {
        holders.push_back(object.name);
      } else {
        others.push_back(object.name);
      }
    }
    const char* const what = holders.empty()
                                 ? "loadstone does not read objects that are not tensors"
                                 : "loadstone does not read these objects, although some of them "
                                   "contain tensors (for example tuples)";
    states.insert(states.begin(), holders.begin(), holders.end());
    std::vector<std::string> all = states;
    all.insert(all.end(), others.begin(), others.end());
    header_.findings.push_back(
        {.severity = Severity::info,
         .code = "dcp.ignored",
         .sources = std::move(states),
         .message = fmt::format("{}: {}: {}", printable(path_, 400), what, name_list(all))});
  }

  // Reads the header of an item, which is one tensor as torch.save wrote it.
  static TensorInfo saved_item(const File& file, const DcpTensor& tensor, const DcpChunk& chunk) {
    FilePart part(*file.source, file.identity, chunk.item_begin, chunk.item_bytes);
    FileHeader header;
    try {
      header = read_torch(part);
    } catch (const Error& error) {
      rethrow_as_item(error, tensor.name, chunk.item_begin);
    }
    if (header.tensors.size() != 1) {
      refuse(file.source->path(),
             {"dcp.item", "an item differs from the metadata", "data.pkl",
              counted(header.tensors.size(), "tensor"), "one tensor", chunk.item_begin},
             tensor.name);
    }
    TensorInfo item = std::move(header.tensors.front());
    item.offset_begin += chunk.item_begin;
    item.offset_end += chunk.item_begin;
    return item;
  }

  // Returns the chunk's runs. A run consists of the last dim in which the chunk is smaller than the
  // tensor, and of all dims after it.
  static AssembledChunk chunk_of(const DcpTensor& tensor, const DcpChunk& chunk,
                                 std::uint64_t file_begin) {
    AssembledChunk made = {.file = chunk.file, .file_begin = file_begin};
    std::uint64_t stride = element_bytes(tensor.dtype);
    made.run_bytes = stride;
    bool is_run = true;  // false after the first dim that the chunk does not cover completely
    std::vector<AssembledChunk::Dim> dims;
    for (std::size_t d = tensor.shape.rank(); d-- > 0;) {
      const std::uint64_t extent = chunk.sizes[d];
      made.first += chunk.offsets[d] * stride;
      if (is_run) {
        made.run_bytes *= extent;
      } else if (extent > 1) {
        dims.push_back({extent, stride});
      }
      is_run = is_run && extent == tensor.shape[d];
      stride *= tensor.shape[d];
    }
    made.dims.assign(dims.rbegin(), dims.rend());
    return made;
  }

  const FileOpener& opener_;
  const std::string& path_;
  std::string folder_;
  FileHeader header_;
  DcpMetadata metadata_;
  std::vector<File> files_;
  std::shared_ptr<Assembly> assembly_ = std::make_shared<Assembly>();
  std::uint64_t next_ = 0;
};

}  // namespace

DcpCheckpoint read_dcp(const FileOpener& opener, const std::string& path) {
  return DcpFolder(opener, path).read();
}

}  // namespace loadstone
