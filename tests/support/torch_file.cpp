#include "support/torch_file.h"

#include <stdexcept>

#include "support/files.h"

namespace loadstone::test {

namespace pickle {

std::string text(std::string_view text) {
  return "X" + raw(static_cast<std::uint32_t>(text.size())) + std::string(text);
}

std::string integer(std::int32_t number) { return "J" + raw(number); }

std::string global(std::string_view module, std::string_view name) {
  return "c" + std::string(module) + "\n" + std::string(name) + "\n";
}

namespace {

std::string joined(const std::vector<std::string>& items) {
  std::string all = "(";
  for (const std::string& item : items) all += item;
  return all;
}

std::string numbers(const std::vector<std::int32_t>& numbers) {
  std::vector<std::string> items;
  for (const std::int32_t number : numbers) items.push_back(integer(number));
  return tuple(items);
}

}  // namespace

std::string tuple(const std::vector<std::string>& items) { return joined(items) + "t"; }
std::string list(const std::vector<std::string>& items) { return "]" + joined(items) + "e"; }
std::string dict(const std::vector<std::string>& items) { return "}" + joined(items) + "u"; }

std::string call(std::string_view module, std::string_view name,
                 const std::vector<std::string>& arguments) {
  return global(module, name) + tuple(arguments) + "R";
}

std::string storage(std::string_view type, std::string_view key, std::int32_t numel) {
  return tuple({text("storage"), global("torch", type), text(key), text("cpu"), integer(numel)}) +
         "Q";
}

std::string tensor(const View& view) {
  return call("torch._utils", "_rebuild_tensor_v2",
              {storage(view.type, view.key, view.numel), integer(view.offset), numbers(view.size),
               numbers(view.stride), "\x89", call("collections", "OrderedDict", {})});
}

std::string whole(const std::string& value) { return "\x80\x02" + value + "."; }

}  // namespace pickle

std::string zip_bytes(const std::vector<ZipEntry>& entries, const ZipOptions& options) {
  const auto u16 = [](std::size_t number) { return raw(static_cast<std::uint16_t>(number)); };
  const auto u32 = [](std::size_t number) { return raw(static_cast<std::uint32_t>(number)); };
  constexpr std::uint32_t in_zip64 = UINT32_MAX;
  std::string file = options.prefix;
  std::string directory;
  for (const ZipEntry& entry : entries) {
    const std::uint32_t begin = static_cast<std::uint32_t>(file.size()) + entry.header_shift;
    const std::string local = entry.local_name.empty() ? entry.name : entry.local_name;
    file += "PK\3\4" + u16(20) + u16(0) + u16(entry.method) + u32(0) + u32(0) +
            u32(entry.bytes.size()) + u32(entry.bytes.size()) + u16(local.size()) + u16(0) + local +
            entry.bytes;
    const std::uint64_t size = entry.bytes.size() + entry.bytes_more;
    const std::string extra =
        options.zip64 ? u16(1) + u16(24) + raw(size) + raw(size) + raw<std::uint64_t>(begin) : "";
    const std::string sizes = options.zip64 ? u32(in_zip64) + u32(in_zip64) : u32(size) + u32(size);
    directory += "PK\1\2" + u16(20) + u16(20) + u16(0) + u16(entry.method) + u32(0) + u32(0) +
                 sizes + u16(entry.name.size()) + u16(extra.size()) + u16(0) + u16(0) + u16(0) +
                 u32(0) + u32(options.zip64 ? in_zip64 : begin) + entry.name + extra;
  }
  const std::uint64_t begin = file.size();
  const std::uint64_t bytes = directory.size();
  const std::uint64_t count = entries.size();
  file += directory;
  if (options.zip64) {
    const std::uint64_t end = file.size();
    file += "PK\6\6" + raw<std::uint64_t>(44) + u16(45) + u16(45) + u32(0) + u32(0) + raw(count) +
            raw(count) + raw(bytes) + raw(begin);
    file += "PK\6\7" + u32(0) + raw(end) + u32(1);
  }
  file += "PK\5\6" + u16(0) + u16(0) + u16(options.zip64 ? UINT16_MAX : count) +
          u16(options.zip64 ? UINT16_MAX : count) + u32(options.zip64 ? in_zip64 : bytes) +
          u32(options.zip64 ? in_zip64 : begin) + u16(options.comment.size()) + options.comment;
  return file;
}

std::string torch_bytes(const std::string& value) {
  return zip_bytes({{.name = "archive/data.pkl", .bytes = pickle::whole(value)},
                    {.name = "archive/byteorder", .bytes = "little"},
                    {.name = "archive/data/0", .bytes = some_bytes(16)},
                    {.name = "archive/version", .bytes = "3\n"}});
}

}  // namespace loadstone::test
