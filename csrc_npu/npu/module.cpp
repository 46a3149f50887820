// SPDX-License-Identifier: Apache-2.0
// The Python module: registration, and the tensors that a transfer needs.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>

#include "queue.h"
#include "transfer.h"

namespace pd::npu {
namespace {

namespace py = pybind11;

using SliceTuple = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t>;
using TensorTuple = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::vector<SliceTuple>>;

std::uint64_t address_of(const at::Tensor& tensor) { return reinterpret_cast<std::uintptr_t>(tensor.data_ptr()); }

std::shared_ptr<const Table> make_table(const std::vector<TensorTuple>& described) {
  std::vector<CacheTensor> tensors;
  for (const auto& [address, block_stride, num_blocks, slices] : described) {
    CacheTensor tensor{address, block_stride, num_blocks, {}};
    for (const auto& [offset, bytes, count, stride] : slices) tensor.slices.push_back({offset, bytes, count, stride});
    tensors.push_back(std::move(tensor));
  }
  return std::make_shared<const Table>(std::move(tensors));
}

// Rows on the device, uploaded once; this one copy waits.
at::Tensor upload_rows(const Table& table, const at::Device& device) {
  const auto count = static_cast<std::int64_t>(table.rows().size());
  auto rows = at::empty({count, 8}, at::TensorOptions().dtype(at::kLong));
  std::memcpy(rows.data_ptr(), table.rows().data(), table.rows().size() * sizeof(Row));
  return rows.to(device);
}

// The tensors of one cache group on one device.
class Group {
 public:
  Group(const std::vector<TensorTuple>& tensors, std::shared_ptr<Kernel> kernel, const std::string& device)
      : table_(make_table(tensors)), transfer_(table_, std::move(kernel)), device_(device) {
    if (transfer_.uses_kernel()) rows_ = upload_rows(*table_, device_);
  }

  std::uint64_t packed_block_bytes() const { return table_->packed_block_bytes(); }
  bool uses_kernel() const { return transfer_.uses_kernel(); }

  std::shared_ptr<Event> extract(const at::Tensor& block_ids, const at::Tensor& staging) const {
    return submit(Direction::kExtract, block_ids, staging);
  }
  std::shared_ptr<Event> inject(const at::Tensor& block_ids, const at::Tensor& staging) const {
    return submit(Direction::kInject, block_ids, staging);
  }

 private:
  std::shared_ptr<Event> submit(Direction direction, const at::Tensor& block_ids, const at::Tensor& staging) const {
    if (!staging.is_privateuseone() || !staging.is_contiguous()) {
      throw std::invalid_argument("staging must be a contiguous tensor on an NPU, it is on " + staging.device().str());
    }
    if (!block_ids.is_cpu() || block_ids.scalar_type() != at::kLong || !block_ids.is_contiguous()) {
      throw std::invalid_argument("block_ids must be a contiguous int64 tensor on the CPU");
    }
    Buffers buffers;
    buffers.staging = address_of(staging);
    buffers.staging_bytes = staging.nbytes();
    auto keep = std::make_shared<std::vector<at::Tensor>>(std::vector<at::Tensor>{staging});
    if (transfer_.uses_kernel()) add_kernel_inputs(block_ids, buffers, *keep);
    buffers.keep = std::move(keep);
    const std::span<const std::int64_t> ids(block_ids.data_ptr<std::int64_t>(),
                                            static_cast<std::size_t>(block_ids.numel()));
    const py::gil_scoped_release released;  // a full queue makes the caller wait
    return transfer_.submit(direction, ids, std::move(buffers), current_stream());
  }

  void add_kernel_inputs(const at::Tensor& block_ids, Buffers& buffers, std::vector<at::Tensor>& keep) const {
    const auto options = at::TensorOptions().dtype(at::kInt);
    auto host = at::empty(block_ids.sizes(), options.pinned_memory(true));
    auto* const out = host.data_ptr<std::int32_t>();
    const auto* const in = block_ids.data_ptr<std::int64_t>();
    std::transform(in, in + block_ids.numel(), out, [](std::int64_t id) { return static_cast<std::int32_t>(id); });
    auto device = at::empty(block_ids.sizes(), options.device(device_));
    buffers.device_rows = address_of(rows_);
    buffers.host_block_ids = address_of(host);
    buffers.device_block_ids = address_of(device);
    keep.insert(keep.end(), {rows_, std::move(host), std::move(device)});
  }

  std::shared_ptr<const Table> table_;
  Transfer transfer_;
  at::Device device_;
  at::Tensor rows_;
};

void synchronize(Event& event) {
  const py::gil_scoped_release released;
  event.synchronize();
}

void wait(Event& event) {
  const py::gil_scoped_release released;
  event.wait(current_stream());
}

}  // namespace
}  // namespace pd::npu

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace pd::npu;
  py::class_<Kernel, std::shared_ptr<Kernel>>(module, "Kernel")
      .def(py::init([](const std::array<std::pair<std::string, std::string>, kNumRoles>& entries, std::uint32_t grid) {
        std::array<Entry, kNumRoles> made;
        for (std::size_t i = 0; i < kNumRoles; ++i) made[i] = {entries[i].first, entries[i].second};
        return std::make_shared<Kernel>(made, grid);
      }));
  py::class_<Event, std::shared_ptr<Event>>(module, "Event")
      .def("query", &Event::query)
      .def("synchronize", &synchronize)
      .def("wait", &wait);
  py::class_<Group>(module, "Group")
      .def(py::init<const std::vector<TensorTuple>&, std::shared_ptr<Kernel>, const std::string&>())
      .def_property_readonly("packed_block_bytes", &Group::packed_block_bytes)
      .def_property_readonly("uses_kernel", &Group::uses_kernel)
      .def("extract", &Group::extract)
      .def("inject", &Group::inject);
  module.def("collect", &Transfer::collect);
  module.def("set_defects", &set_defects);
}
