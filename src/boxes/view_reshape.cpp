// Implements reshape(), the only operation on views that mixes dimensions. It distributes the steps
// of the view's boxes over the new dimensions.
#include <algorithm>
#include <utility>

#include "boxes/dims.h"
#include "boxes/view.h"

namespace loadstone {

namespace {

class Dealer {
 public:
  Dealer(const Shape& shape, std::vector<ViewPiece>& made)
      : shape_(shape), made_(made), strides_(row_strides(shape)) {}

  // Converts the box to pieces. Returns false if there are too many pieces.
  bool deal(Box box) {
    std::vector<Box> work;
    work.push_back(std::move(box));
    while (!work.empty()) {
      Box next = std::move(work.back());
      work.pop_back();
      if (deal_whole(next)) continue;
      if (work.size() + made_.size() > pieces_max) return false;
      split(next, work);
    }
    return true;
  }

 private:
  // Converts the box to a single piece. On failure, sets blocker_ to the dimension that prevents
  // it.
  bool deal_whole(const Box& box) {
    ViewPiece piece;
    piece.source = box.source;
    piece.source_offset = box.source_offset;
    std::vector<std::uint64_t> last;
    for (std::size_t d = 0; d < strides_.size(); ++d) {
      piece.begin.push_back(box.target_offset / strides_[d] % shape_[d]);
    }
    last = piece.begin;
    for (std::size_t i = 0; i < box.dims.size(); ++i) {
      blocker_ = i;
      if (!deal_dim(box.dims[i], piece, last)) return false;
    }
    made_.push_back(std::move(piece));
    return true;
  }

  bool deal_dim(BoxDim dim, ViewPiece& piece, std::vector<std::uint64_t>& last) {
    while (dim.extent > 1) {
      const std::size_t d = home(dim.target_stride);
      const std::uint64_t stride = strides_[d];
      limit_ = stride * shape_[d];
      if (dim.target_stride % stride != 0) return false;
      const std::uint64_t step = dim.target_stride / stride;
      std::uint64_t extent = dim.extent;
      if ((dim.extent - 1) * step >= shape_[d]) {  // continues in the next outer dimension
        extent = limit_ / dim.target_stride;
        if (limit_ % dim.target_stride != 0 || dim.extent % extent != 0) return false;
      }
      last[d] += (extent - 1) * step;
      if (last[d] >= shape_[d]) return false;
      if (extent > 1) {
        piece.factors.push_back({static_cast<std::uint32_t>(d), extent, step, dim.source_stride});
      }
      if (extent == dim.extent) return true;
      dim = {dim.extent / extent, dim.source_stride * extent, limit_};
    }
    return true;
  }

  // Returns the dimension with the largest stride that is not larger than the step.
  std::size_t home(std::uint64_t step) const {
    std::size_t d = 0;
    while (d + 1 < strides_.size() && (strides_[d] > step || shape_[d] == 1)) ++d;
    return d;
  }

  // Splits the box in two along the blocking dimension, if possible at the end of a row.
  void split(const Box& box, std::vector<Box>& work) const {
    const BoxDim& dim = box.dims[blocker_];
    const std::uint64_t rest = limit_ - box.target_offset % limit_;
    const std::uint64_t in_row = (rest - 1) / dim.target_stride + 1;
    const std::uint64_t row = std::max<std::uint64_t>(limit_ / dim.target_stride, 1);
    std::uint64_t count = dim.extent / 2;
    if (in_row < dim.extent && in_row != row) {
      count = in_row;
    } else if (dim.extent > row && row > 1) {
      count = dim.extent % row == 0 ? row : dim.extent / row * row;
    }
    Box head = box;
    Box tail = box;
    head.dims[blocker_].extent = count;
    tail.dims[blocker_].extent = dim.extent - count;
    tail.target_offset += count * dim.target_stride;
    tail.source_offset += count * dim.source_stride;
    for (Box* part : {&tail, &head}) {
      std::erase_if(part->dims, [](const BoxDim& d) { return d.extent == 1; });
      work.push_back(std::move(*part));
    }
  }

  const Shape& shape_;
  std::vector<ViewPiece>& made_;
  std::vector<std::uint64_t> strides_;
  std::size_t blocker_ = 0;
  std::uint64_t limit_ = 1;
};

}  // namespace

std::optional<Problem> reshape(View& view, const Shape& shape) {
  if (!shape.numel() || shape.numel() != view.shape.numel()) {
    return Problem{"a reshape must keep the number of elements", view.shape.text(), shape.text()};
  }
  if (shape.numel() == 0u) {
    for (ViewPiece& piece : view.pieces) {
      piece.begin.assign(shape.rank(), 0);
      piece.factors = {{0, 0, 1, 1}};
    }
    view.shape = shape;
    return std::nullopt;
  }
  std::vector<ViewPiece> made;
  Dealer dealer(shape, made);
  for (Box& box : boxes_of(view)) {
    if (!dealer.deal(std::move(box))) return too_many_pieces();
  }
  view.pieces = std::move(made);
  view.shape = shape;
  return std::nullopt;
}

}  // namespace loadstone
