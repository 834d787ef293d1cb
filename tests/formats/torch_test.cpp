// Tests torch files at the level of opcodes. The Python tests read files that torch wrote, and
// tests/hostile has malformed files.
#include "formats/torch.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <memory>

#include "loadstone/catalog.h"
#include "support/errors.h"
#include "support/files.h"
#include "support/memory_storage.h"
#include "support/torch_file.h"

namespace loadstone::test {

namespace {

using namespace pickle;  // NOLINT: opcode names
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr const char* path = "/m/model.pt";

FileHeader header_of(const std::string& bytes) {
  MemoryStorage storage;
  storage.add_file(path, bytes);
  return read_torch(*storage.open(path));
}

std::string code(const std::string& bytes) {
  return code_of([&] { (void)header_of(bytes); });
}

std::string code_of_value(const std::string& value) { return code(torch_bytes(value)); }

std::vector<std::string> names(const FileHeader& header) {
  std::vector<std::string> all;
  for (const TensorInfo& tensor : header.tensors) all.push_back(tensor.name);
  std::ranges::sort(all);
  return all;
}

std::vector<std::string> names_of_value(const std::string& value) {
  return names(header_of(torch_bytes(value)));
}

std::vector<std::string> codes(const FileHeader& header) {
  std::vector<std::string> all;
  for (const Finding& finding : header.findings) all.push_back(finding.code);
  return all;
}

TensorInfo only_tensor(const std::string& bytes) {
  const FileHeader header = header_of(bytes);
  EXPECT_EQ(header.tensors.size(), 1u);
  return header.tensors.at(0);
}

std::string with_w(const std::string& value) { return dict({text("w"), value}); }

// ---- contents of valid files

TEST(Torch, ATensorIsARangeOfTheFile) {
  const std::string bytes = torch_bytes(with_w(tensor({.offset = 1, .size = {3}, .stride = {1}})));
  const FileHeader header = header_of(bytes);
  ASSERT_EQ(names(header), std::vector<std::string>{"w"});
  EXPECT_THAT(header.findings, IsEmpty());
  const TensorInfo& tensor = header.tensors[0];
  EXPECT_EQ(tensor.encoding, Encoding(Dtype::f32));
  EXPECT_EQ(tensor.shape, Shape({3}));
  EXPECT_THAT(tensor.strides, IsEmpty());
  EXPECT_EQ(tensor.byte_count(), 12u);
  EXPECT_EQ(bytes.substr(tensor.offset_begin, 12), some_bytes(16).substr(4));
  EXPECT_EQ(header.shard.data_begin, tensor.offset_begin - 4);
  EXPECT_EQ(header.shard.tail_begin, tensor.offset_end);
  EXPECT_EQ(header.shard.format, FileFormat::torch);
}

TEST(Torch, AViewKeepsItsStrides) {
  const auto strided = [](const View& view) {
    return only_tensor(torch_bytes(with_w(tensor(view))));
  };
  const TensorInfo transposed = strided({.stride = {1, 2}});
  EXPECT_THAT(transposed.strides, ElementsAre(1, 2));
  EXPECT_EQ(transposed.byte_count(), 16u);
  const TensorInfo expanded = strided({.offset = 2, .size = {5, 2}, .stride = {0, 1}});
  EXPECT_THAT(expanded.strides, ElementsAre(0, 1));
  EXPECT_EQ(expanded.byte_count(), 8u);
  const TensorInfo each_second = strided({.size = {2}, .stride = {2}});
  EXPECT_THAT(each_second.strides, ElementsAre(2));
  EXPECT_EQ(each_second.byte_count(), 12u);
  // Strides have no meaning for a dimension of 1 and for a tensor without elements.
  EXPECT_THAT(strided({.size = {1, 4}, .stride = {77, 1}}).strides, IsEmpty());
  const TensorInfo none = strided({.offset = 3, .size = {0, 4}, .stride = {9, 9}});
  EXPECT_THAT(none.strides, IsEmpty());
  EXPECT_EQ(none.byte_count(), 0u);
  EXPECT_EQ(strided({.offset = 3, .size = {}, .stride = {}}).byte_count(), 4u);
}

TEST(Torch, TiesAreTheSameRange) {
  const FileHeader header =
      header_of(torch_bytes(dict({text("a"), tensor(), text("b"), tensor()})));
  ASSERT_EQ(header.tensors.size(), 2u);
  EXPECT_EQ(header.tensors[0].offset_begin, header.tensors[1].offset_begin);
  EXPECT_EQ(header.tensors[0].offset_end, header.tensors[1].offset_end);
}

TEST(Torch, TheDtypeIsThatOfTheStorageOrOfTheCall) {
  const auto dtype = [](std::string_view type, std::int32_t numel) {
    return only_tensor(torch_bytes(with_w(
                           tensor({.type = type, .numel = numel, .size = {1}, .stride = {1}}))))
        .encoding;
  };
  EXPECT_EQ(dtype("DoubleStorage", 2), Encoding(Dtype::f64));
  EXPECT_EQ(dtype("BFloat16Storage", 8), Encoding(Dtype::bf16));
  EXPECT_EQ(dtype("BoolStorage", 16), Encoding(Dtype::boolean));
  EXPECT_EQ(dtype("ComplexDoubleStorage", 1), Encoding(Dtype::c128));
  const auto third = [](const std::string& storage, std::string_view name) {
    return with_w(call("torch._utils", "_rebuild_tensor_v3",
                       {storage, integer(1), tuple({integer(3)}), tuple({integer(1)}), "\x89",
                        call("collections", "OrderedDict", {}), global("torch", name)}));
  };
  const std::string untyped = storage("UntypedStorage", "0", 16);
  const TensorInfo u16 = only_tensor(torch_bytes(third(untyped, "uint16")));
  EXPECT_EQ(u16.encoding, Encoding(Dtype::u16));
  EXPECT_EQ(u16.byte_count(), 6u);
  EXPECT_EQ(only_tensor(torch_bytes(third(untyped, "float8_e4m3fn"))).encoding,
            Encoding(Dtype::f8_e4m3));
  EXPECT_EQ(code_of_value(third(untyped, "qint8")), "pt.storage_type");
  EXPECT_EQ(code_of_value(third(storage("FloatStorage", "0", 4), "uint16")), "pt.arguments");
  EXPECT_EQ(code_of_value(with_w(tensor({.type = "UntypedStorage", .numel = 16}))), "pt.arguments");
}

// ---- choice of the state dict

TEST(Torch, UsualWrappersAreTakenOff) {
  const std::string state = dict({text("a.w"), tensor()});
  for (const char* wrapper : {"state_dict", "model", "module", "model_state_dict"}) {
    const FileHeader header = header_of(torch_bytes(
        dict({text("epoch"), integer(3), text("optimizer"), state, text(wrapper), state})));
    EXPECT_THAT(names(header), ElementsAre("a.w")) << wrapper;
    EXPECT_THAT(codes(header), ElementsAre("pt.ignored")) << wrapper;
    EXPECT_THAT(header.findings[0].message, HasSubstr("optimizer"));
  }
  EXPECT_THAT(names_of_value(dict({text("model"), dict({text("state_dict"), state})})),
              ElementsAre("a.w"));
  // A dict that directly contains a tensor is the state dict. A nested dict without tensors is not.
  EXPECT_THAT(names_of_value(dict({text("model"), state, text("b"), tensor()})),
              ElementsAre("b", "model.a.w"));
  EXPECT_THAT(
      names_of_value(dict({text("model"), dict({text("x"), integer(1)}), text("net"), state})),
      ElementsAre("net.a.w"));
}

// The file has two sets of weights. The finding names the chosen set and the ignored set.
TEST(Torch, AnotherSetOfTheSameNamesIsAWarning) {
  const std::string state = dict({text("a.w"), tensor()});
  const std::string others = dict({text("b"), tensor()});
  const auto severity = [&](const std::string& wrapper, const std::string& key,
                            const std::string& other) {
    const FileHeader header =
        header_of(torch_bytes(dict({text(wrapper), state, text(key), other})));
    EXPECT_THAT(names(header), ElementsAre("a.w"));
    EXPECT_THAT(codes(header), ElementsAre("pt.ignored"));
    const Finding& finding = header.findings[0];
    EXPECT_THAT(finding.message, HasSubstr("'" + key + "'"));
    if (finding.severity == Severity::warning) {
      EXPECT_THAT(finding.message, HasSubstr("loadstone reads '" + wrapper + "'"));
      EXPECT_THAT(finding.message, HasSubstr("same names in '" + key + "'"));
    }
    return finding.severity;
  };
  EXPECT_EQ(severity("model", "model_ema", state), Severity::warning);
  EXPECT_EQ(severity("state_dict", "model", state), Severity::warning);
  EXPECT_EQ(severity("module", "ema", dict({text("shadow"), state})), Severity::warning);
  EXPECT_EQ(severity("model", "callbacks", list({others, state})), Severity::warning);
  // Controls: the second dict has different names, or contains optimizer state per parameter.
  EXPECT_EQ(severity("model", "optimizer", others), Severity::info);
  EXPECT_EQ(severity("model", "optimizer", dict({text("a.w"), others})), Severity::info);
  EXPECT_EQ(severity("model", "epoch", integer(3)), Severity::info);
}

TEST(Torch, ExtraStateThatIsNoTensorIsNamed) {
  const std::string several = dict({text("scale"), tensor(), text("step"), integer(9)});
  for (const std::string& value :
       {dict({text("amax"), integer(3)}), integer(7), text("words"), list({integer(1)}), several}) {
    const FileHeader header =
        header_of(torch_bytes(dict({text("w"), tensor(), text("a._extra_state"), value})));
    ASSERT_THAT(codes(header), ElementsAre("pt.ignored"));
    EXPECT_EQ(header.findings[0].severity, Severity::info);
    EXPECT_THAT(header.findings[0].sources, ElementsAre("a._extra_state"));
  }
  for (const std::string& value : {tensor(), std::string("N")}) {  // control
    EXPECT_THAT(codes(header_of(
                    torch_bytes(dict({text("w"), tensor(), text("a._extra_state"), value, text("b"),
                                      integer(1), text("my_extra_state"), integer(1)})))),
                IsEmpty());
  }
}

TEST(Torch, WhatIsNestedIsJoinedWithDots) {
  EXPECT_THAT(names_of_value(dict({text("unet"), dict({text("w"), tensor()}), text("many"),
                                   list({tensor(), integer(1), tuple({tensor()})}), text("step"),
                                   integer(7)})),
              ElementsAre("many.0", "many.2.0", "unet.w"));
  EXPECT_EQ(code_of_value(dict({text("a.b"), tensor(), text("a"), dict({text("b"), tensor()})})),
            "pt.duplicate");
}

// In each of 20 nested dicts, two keys refer to the next dict: one kilobyte gives a tensor a
// million names.
TEST(Torch, ManyNamesOfOneDictAreNotMultiplied) {
  std::string value = with_w(tensor()) + "q" + '\0';
  for (char i = 1; i <= 20; ++i) {
    const std::string last = std::string("h") + static_cast<char>(i - 1);
    value += "0" + dict({text("a"), last, text("b"), last}) + "q" + i;
  }
  const FileHeader header = header_of(torch_bytes(value));
  EXPECT_LT(header.tensors.size(), 2000u);
  EXPECT_THAT(codes(header), ElementsAre("pt.budget"));
  EXPECT_THAT(names_of_value(dict(
                  {text("a"), with_w(tensor()) + "q" + '\0', text("b"), std::string("h\0", 2)})),
              ElementsAre("a.w", "b.w"));
}

TEST(Torch, PythonTwosOrderedDictAndAttributesAreRead) {
  const std::string pairs = list({list({text("w"), tensor()})});
  EXPECT_THAT(names_of_value(call("collections", "OrderedDict", {pairs})), ElementsAre("w"));
  const std::string metadata = dict({text("_metadata"), dict({})});
  EXPECT_THAT(names_of_value(with_w(tensor()) + metadata + "b"), ElementsAre("w"));
  EXPECT_EQ(code_of_value(call("collections", "OrderedDict", {list({integer(1)})})), "pt.opcode");
}

TEST(Torch, NothingForeignIsTakenForATensor) {
  const std::string foreign = call("builtins", "eval", {text("1")});
  EXPECT_EQ(code_of_value(with_w(foreign)), "pt.global_refused");
  EXPECT_EQ(code_of_value(foreign), "pt.global_refused");
  EXPECT_EQ(code_of_value(with_w(call("torch._utils", "_rebuild_qtensor", {}))), "pt.unsupported");
  EXPECT_EQ(code_of_value(text("w")), "pt.top_level");
  // An unknown global next to the state dict is harmless, because loadstone never calls it.
  const FileHeader header =
      header_of(torch_bytes(dict({text("state_dict"), with_w(tensor()), text("hook"), foreign})));
  EXPECT_THAT(names(header), ElementsAre("w"));
  EXPECT_THAT(codes(header), ElementsAre("pt.ignored"));
  // An object of an unknown class may receive items. A global, an integer or a tensor may not.
  EXPECT_EQ(code_of_value(dict({text("state_dict"), with_w(tensor()), text("deque"),
                                call("collections", "deque", {}) + integer(1) + "a"})),
            "");
  EXPECT_EQ(code_of_value(with_w(global("torch", "nn") + text("x") + "b")), "pt.opcode");
  EXPECT_EQ(code_of_value(with_w(tensor() + text("x") + integer(1) + "s")), "pt.opcode");
}

TEST(Torch, AConjugateIsNoPlainTensor) {
  const auto with_metadata = [](const std::string& metadata) {
    return with_w(
        call("torch._utils", "_rebuild_tensor_v2",
             {storage("FloatStorage", "0", 4), integer(0), tuple({integer(4)}), tuple({integer(1)}),
              "\x89", call("collections", "OrderedDict", {}), metadata}));
  };
  EXPECT_EQ(code_of_value(with_metadata(dict({text("conj"), "\x88"}))), "pt.unsupported");
  EXPECT_EQ(code_of_value(with_metadata("}")), "");
}

// ---- the archive

std::vector<ZipEntry> good_entries() {
  return {{.name = "x/data.pkl", .bytes = pickle::whole(with_w(tensor()))},
          {.name = "x/data/0", .bytes = some_bytes(16)}};
}

TEST(TorchZip, TheControlsOpen) {
  EXPECT_EQ(code(zip_bytes(good_entries())), "");
  EXPECT_EQ(code(zip_bytes(good_entries(), {.zip64 = true})), "");
  EXPECT_EQ(code(zip_bytes(good_entries(), {.comment = "a comment"})), "");
  auto entries = good_entries();
  std::ranges::swap(entries[0], entries[1]);  // the pickle follows the data
  const FileHeader header = header_of(zip_bytes(entries));
  EXPECT_LT(header.shard.data_begin, header.shard.tail_begin);
}

TEST(TorchZip, TheDigestSeesThePickleWhereverItStands) {
  for (const bool behind : {false, true}) {
    auto entries = good_entries();
    if (behind) std::ranges::swap(entries[0], entries[1]);
    std::string bytes = zip_bytes(entries);
    const std::string digest = header_of(bytes).shard.header_digest;
    const std::size_t at = bytes.find("cpu");
    bytes[at] = 'g';
    EXPECT_NE(header_of(bytes).shard.header_digest, digest) << behind;
  }
}

TEST(TorchZip, RecordsThatSayTwoThingsAreRefused) {
  auto entries = good_entries();
  entries[1].local_name = "x/data/1";
  EXPECT_EQ(code(zip_bytes(entries)), "pt.zip");
  entries = good_entries();
  entries[1].bytes_more = 1;
  EXPECT_EQ(code(zip_bytes(entries)), "pt.zip");
  entries = good_entries();
  entries[1].header_shift = 1;
  EXPECT_EQ(code(zip_bytes(entries)), "pt.zip");
  entries = good_entries();
  entries.push_back(entries[0]);
  EXPECT_EQ(code(zip_bytes(entries)), "pt.duplicate");
  EXPECT_EQ(code(zip_bytes(good_entries(), {.prefix = "#!/bin/sh\n"})), "pt.not_torch");
  EXPECT_EQ(code(zip_bytes(good_entries(), {.prefix = "PK\3\4"})), "pt.zip");
  EXPECT_EQ(code(zip_bytes(good_entries()) + "x"), "pt.zip");
}

// One record contains another record. Each header is valid, but the records share bytes.
TEST(TorchZip, TwoRecordsOfTheSameBytesAreRefused) {
  auto entries = good_entries();
  const std::string inner = zip_bytes({{.name = "x/data/2", .bytes = "abcd"}});
  const std::string outer_name = "x/data/1";
  entries.push_back({.name = outer_name, .bytes = inner});
  entries.push_back({.name = "x/data/2", .bytes = "abcd"});
  EXPECT_EQ(code(zip_bytes(entries)), "");
  // The offset in the directory is moved back to the first header of the inner archive.
  entries[3].header_shift = static_cast<std::uint32_t>(-static_cast<std::int32_t>(inner.size()));
  EXPECT_EQ(code(zip_bytes(entries)), "pt.zip");
}

TEST(TorchZip, CompressedRecordsAreRefusedWhereTheyAreNeeded) {
  auto entries = good_entries();
  entries[1].method = 8;
  EXPECT_EQ(code(zip_bytes(entries)), "pt.compressed");
  entries = good_entries();
  entries[0].method = 8;
  EXPECT_EQ(code(zip_bytes(entries)), "pt.compressed");
  entries = good_entries();
  entries.push_back({.name = "x/notes", .bytes = "unused", .method = 8});
  EXPECT_EQ(code(zip_bytes(entries)), "");
}

}  // namespace

}  // namespace loadstone::test
