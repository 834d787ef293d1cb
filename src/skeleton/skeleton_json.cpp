// Reads and writes skeletons as JSON, see docs/skeleton-json.md.
#include <string>

#include "base/only_errors.h"
#include "base/text.h"
#include "loadstone/skeleton.h"
#include "tensor/tensor_json.h"

namespace loadstone {

namespace {

constexpr std::size_t text_bytes_max = 256u << 20;

struct UserDtype {
  Dtype& dtype;
};

void read_json(const JsonReader& reader, JsonReader::Element value, const JsonPlace& place,
               UserDtype into) {
  const std::string_view text = reader.string(value, place);
  auto dtype = parse_dtype_name(text);
  if (!dtype) dtype = parse_dtype(text);
  if (!dtype) reader.refuse(place, "the dtype is unknown", printable(text), "F32, BF16, I64 ...");
  into.dtype = *dtype;
}

}  // namespace

void visit_fields(auto& visitor, Like<Slice> auto& slice) {
  visitor.member("begin", slice.begin);
  visitor.member("shape", slice.shape);
  visitor.optional("groups", slice.groups);
}

template <typename Visitor>
void visit_fields(Visitor& visitor, Like<Target> auto& target) {
  visitor.member("name", target.name);
  visitor.member("shape", target.shape);
  if constexpr (Visitor::is_reading) {
    visitor.member("dtype", UserDtype{target.dtype});
    visitor.optional("kind", target.kind);
    if (visitor.optional("tie_of", target.tie_of) && target.tie_of.empty()) {
      visitor.refuse("tie_of", "the name is empty; write null instead");
    }
  } else {
    visitor.member("dtype", target.dtype);
    visitor.member("kind", target.kind);
    visitor.member("tie_of", target.tie_of.empty() ? nullptr : &target.tie_of);
  }
  visitor.optional("slice", target.slice);
}

Skeleton Skeleton::from_json(std::string_view text) {
  return only_errors([&] {
    const JsonDocument document(text, "skeleton.json", text_bytes_max);
    const JsonReader reader("skeleton.json");
    const JsonPlace top;
    JsonObject fields(reader, document.root(), top);
    Skeleton skeleton;
    skeleton.values_known = false;
    fields.member("targets", skeleton.targets);
    fields.done();
    skeleton.validate();
    return skeleton;
  });
}

std::string Skeleton::to_json() const {
  return only_errors([&] {
    JsonWriter json(1);
    json.begin_object();
    json.member("targets", targets);
    json.end_object();
    return json.take() + "\n";
  });
}

}  // namespace loadstone
