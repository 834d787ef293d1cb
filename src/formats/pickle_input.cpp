#include "formats/pickle_input.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "formats/file_header.h"
#include "formats/torch_pickle.h"

namespace loadstone {

namespace {

struct OpcodeName {
  unsigned char code;
  std::string_view name;
};

// The taken ones in the order of their groups below, then those that are refused by name.
constexpr auto opcode_names = std::to_array<OpcodeName>({
    {0x80, "PROTO"},
    {0x95, "FRAME"},
    {'.', "STOP"},
    {'N', "NONE"},
    {0x88, "NEWTRUE"},
    {0x89, "NEWFALSE"},
    {'J', "BININT"},
    {'K', "BININT1"},
    {'M', "BININT2"},
    {0x8a, "LONG1"},
    {'G', "BINFLOAT"},
    {'X', "BINUNICODE"},
    {0x8c, "SHORT_BINUNICODE"},
    {0x8d, "BINUNICODE8"},
    {'U', "SHORT_BINSTRING"},
    {'T', "BINSTRING"},
    {'C', "SHORT_BINBYTES"},
    {'B', "BINBYTES"},
    {0x8e, "BINBYTES8"},
    {'(', "MARK"},
    {'0', "POP"},
    {'1', "POP_MARK"},
    {'2', "DUP"},
    {')', "EMPTY_TUPLE"},
    {0x85, "TUPLE1"},
    {0x86, "TUPLE2"},
    {0x87, "TUPLE3"},
    {'t', "TUPLE"},
    {']', "EMPTY_LIST"},
    {'}', "EMPTY_DICT"},
    {0x8f, "EMPTY_SET"},
    {'a', "APPEND"},
    {'e', "APPENDS"},
    {'s', "SETITEM"},
    {'u', "SETITEMS"},
    {0x90, "ADDITEMS"},
    {0x91, "FROZENSET"},
    {'q', "BINPUT"},
    {'r', "LONG_BINPUT"},
    {0x94, "MEMOIZE"},
    {'h', "BINGET"},
    {'j', "LONG_BINGET"},
    {'c', "GLOBAL"},
    {0x93, "STACK_GLOBAL"},
    {'R', "REDUCE"},
    {0x81, "NEWOBJ"},
    {'b', "BUILD"},
    {'Q', "BINPERSID"},
    {'i', "INST"},
    {'o', "OBJ"},
    {0x82, "EXT1"},
    {0x83, "EXT2"},
    {0x84, "EXT4"},
    {0x92, "NEWOBJ_EX"},
    {'P', "PERSID"},
    {'I', "INT"},
    {'L', "LONG"},
    {0x8b, "LONG4"},
    {'F', "FLOAT"},
    {'S', "STRING"},
    {'V', "UNICODE"},
    {'d', "DICT"},
    {'l', "LIST"},
    {'g', "GET"},
    {'p', "PUT"},
    {0x96, "BYTEARRAY8"},
    {0x97, "NEXT_BUFFER"},
    {0x98, "READONLY_BUFFER"},
});

}  // namespace

std::string opcode_name(unsigned char code) {
  const auto* found = std::ranges::find(opcode_names, code, &OpcodeName::code);
  return found == opcode_names.end() ? fmt::format("0x{:02x}", code) : std::string(found->name);
}

std::optional<std::int64_t> long_number(std::span<const std::byte> bytes) noexcept {
  if (bytes.empty()) return 0;
  const auto is_negative = [&] { return (bytes.back() & std::byte{0x80}) != std::byte{0}; };
  const bool negative = is_negative();
  const std::byte sign = negative ? std::byte{0xff} : std::byte{0};
  // Bytes that only repeat the sign count for nothing.
  while (bytes.size() > 8 && bytes.back() == sign) bytes = bytes.first(bytes.size() - 1);
  if (bytes.size() > 8 || is_negative() != negative) return std::nullopt;
  std::uint64_t value = negative ? UINT64_MAX : 0;
  std::memcpy(&value, bytes.data(), bytes.size());
  return static_cast<std::int64_t>(value);
}

unsigned char PickleInput::next_opcode() {
  op_begin_ = position();
  op_ = '.';  // what is missing where the pickle ends between opcodes
  op_ = number<unsigned char>();
  return op_;
}

std::span<const std::byte> PickleInput::take(std::uint64_t count) {
  if (count > remaining()) {
    refuse("pt.truncated", "the pickle ends too early",
           fmt::format("{} of {}", bytes_text(remaining()), bytes_text(count)), "all of them");
  }
  if (count > have_ - taken_) {
    if (consumed() + count > pickle_bytes_max) {
      refuse("pt.pickle_too_large", "the pickle is larger than any checkpoint's",
             "more than " + bytes_text(pickle_bytes_max), "a pickle of names and shapes");
    }
    refill(count);
  }
  const auto bytes = std::span<const std::byte>(buffer_).subspan(taken_, count);
  taken_ += count;
  return bytes;
}

void PickleInput::refill(std::uint64_t count) {
  constexpr std::uint64_t ahead = 64 << 10;
  const std::uint64_t begin = position();
  const std::uint64_t wanted = std::min(std::max(count, ahead), end_ - begin);
  buffer_.resize(wanted);
  source_.read(begin, std::span(buffer_));
  next_ = begin + wanted;
  have_ = wanted;
  taken_ = 0;
}

std::string_view PickleInput::line() {
  line_.clear();
  while (true) {
    const auto next = static_cast<char>(number<unsigned char>());
    if (next == '\n') return line_;
    line_ += next;
  }
}

void PickleInput::refuse(const char* code, std::string message, std::string found,
                         std::string expected) const {
  const std::string field = opcode_name(op_);
  loadstone::refuse(source_.path(), {code, std::move(message), field, std::move(found),
                                     std::move(expected), op_begin_});
}

}  // namespace loadstone
