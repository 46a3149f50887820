// SPDX-License-Identifier: Apache-2.0
#include "wire.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace pd {
namespace {

static_assert(std::endian::native == std::endian::little, "frames are little-endian");
static_assert(sizeof(SideRun) == kRunBytes, "runs travel as they are");

class Writer {
 public:
  explicit Writer(std::size_t size) { bytes_.reserve(size); }
  template <typename T>
  void put(const T& value) {
    const auto* first = reinterpret_cast<const std::byte*>(&value);
    bytes_.insert(bytes_.end(), first, first + sizeof(T));
  }
  void put(const std::string& text, std::size_t size) {
    const auto* first = reinterpret_cast<const std::byte*>(text.data());
    bytes_.insert(bytes_.end(), first, first + size);
  }
  void put_header(FrameKind kind, std::size_t body_bytes, std::uint32_t sequence) {
    put(kFrameMagic);
    put(kind);
    put(static_cast<std::uint32_t>(body_bytes));
    put(sequence);
  }
  std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  std::vector<std::byte> bytes_;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}
  template <typename T>
  T get() {
    T value;
    std::memcpy(&value, bytes_.data() + position_, sizeof(T));
    position_ += sizeof(T);
    return value;
  }
  std::span<const std::byte> rest() const { return bytes_.subspan(position_); }

 private:
  std::span<const std::byte> bytes_;
  std::size_t position_ = 0;
};

std::size_t max_body(FrameKind kind) {
  switch (kind) {
    case FrameKind::kRead:
    case FrameKind::kWrite:
      return kMaxBodyBytes;
    case FrameKind::kReply:
      return kReplyBytes + kMaxReasonBytes;
    case FrameKind::kBye:
      return 0;
  }
  return 0;
}

std::string check_run(const SideRun& run, std::uint64_t tensor_bytes) {
  if (run.bytes == 0 || run.count == 0 || run.bytes > tensor_bytes || run.offset > tensor_bytes - run.bytes) {
    return "run of " + std::to_string(run.count) + " x " + std::to_string(run.bytes) + " bytes at " +
           std::to_string(run.offset) + " of a tensor of " + std::to_string(tensor_bytes) + " bytes";
  }
  if (run.count == 1) {
    return {};
  }
  // Pieces that do not overlap: so no run is longer than its tensor, and the sums below stay small.
  const auto stride = static_cast<__int128>(run.stride);
  const auto apart = stride < 0 ? -stride : stride;
  const auto last = static_cast<__int128>(run.offset) + stride * static_cast<__int128>(run.count - 1);
  const bool fits = run.count <= tensor_bytes && apart >= static_cast<__int128>(run.bytes) && last >= 0 &&
                    last + static_cast<__int128>(run.bytes) <= static_cast<__int128>(tensor_bytes);
  return fits ? std::string{}
              : std::to_string(run.count) + " pieces of " + std::to_string(run.bytes) + " bytes every " +
                    std::to_string(run.stride) + " bytes from " + std::to_string(run.offset) + " of a tensor of " +
                    std::to_string(tensor_bytes) + " bytes";
}

}  // namespace

std::vector<std::byte> encode_request(const Request& request, std::uint32_t sequence) {
  const std::size_t body = kRequestBytes + request.runs.size() * kRunBytes;
  Writer writer(kHeaderBytes + body);
  writer.put_header(request.is_write ? FrameKind::kWrite : FrameKind::kRead, body, sequence);
  writer.put(request.cache_id);
  writer.put(request.first_byte);
  writer.put(request.num_bytes);
  writer.put(request.tensor_start);
  writer.put(request.tensor_stop);
  writer.put(static_cast<std::uint32_t>(request.runs.size()));
  writer.put(std::uint32_t{0});
  for (const SideRun& run : request.runs) {
    writer.put(run);
  }
  return writer.take();
}

std::vector<std::byte> encode_reply(const Reply& reply, std::uint32_t sequence) {
  const std::size_t reason = std::min(reply.reason.size(), kMaxReasonBytes);
  Writer writer(kHeaderBytes + kReplyBytes + reason);
  writer.put_header(FrameKind::kReply, kReplyBytes + reason, sequence);
  writer.put(reply.num_bytes);
  writer.put(reply.status);
  writer.put(static_cast<std::uint32_t>(reason));
  writer.put(reply.reason, reason);
  return writer.take();
}

std::vector<std::byte> encode_bye() {
  Writer writer(kHeaderBytes);
  writer.put_header(FrameKind::kBye, 0, 0);
  return writer.take();
}

std::optional<FrameHeader> decode_header(std::span<const std::byte, kHeaderBytes> bytes) {
  Reader reader(bytes);
  if (reader.get<std::uint32_t>() != kFrameMagic) {
    return std::nullopt;
  }
  const auto kind = reader.get<std::uint32_t>();
  if (kind < static_cast<std::uint32_t>(FrameKind::kRead) || kind > static_cast<std::uint32_t>(FrameKind::kBye)) {
    return std::nullopt;
  }
  FrameHeader header{static_cast<FrameKind>(kind), reader.get<std::uint32_t>(), reader.get<std::uint32_t>()};
  if (header.body_bytes > max_body(header.kind)) {
    return std::nullopt;
  }
  return header;
}

std::optional<Request> decode_request(const FrameHeader& header, std::span<const std::byte> body) {
  if (body.size() < kRequestBytes) {
    return std::nullopt;
  }
  Reader reader(body);
  Request request;
  request.is_write = header.kind == FrameKind::kWrite;
  request.cache_id = reader.get<std::int64_t>();
  request.first_byte = reader.get<std::uint64_t>();
  request.num_bytes = reader.get<std::uint64_t>();
  request.tensor_start = reader.get<std::uint32_t>();
  request.tensor_stop = reader.get<std::uint32_t>();
  const auto num_runs = reader.get<std::uint32_t>();
  if (reader.get<std::uint32_t>() != 0 || num_runs > kMaxRuns || body.size() != kRequestBytes + num_runs * kRunBytes) {
    return std::nullopt;
  }
  request.runs.resize(num_runs);
  for (SideRun& run : request.runs) {
    run = reader.get<SideRun>();
  }
  return request;
}

std::optional<Reply> decode_reply(std::span<const std::byte> body) {
  if (body.size() < kReplyBytes) {
    return std::nullopt;
  }
  Reader reader(body);
  Reply reply;
  reply.num_bytes = reader.get<std::uint64_t>();
  reply.status = reader.get<std::uint32_t>();
  if (body.size() != kReplyBytes + reader.get<std::uint32_t>()) {
    return std::nullopt;
  }
  const std::span<const std::byte> reason = reader.rest();
  reply.reason.assign(reinterpret_cast<const char*>(reason.data()), reason.size());
  return reply;
}

std::string check_request(const Request& request, std::size_t num_tensors, std::uint64_t tensor_bytes) {
  if (request.tensor_start >= request.tensor_stop || request.tensor_stop > num_tensors) {
    return "tensors " + std::to_string(request.tensor_start) + ".." + std::to_string(request.tensor_stop) +
           " of a cache of " + std::to_string(num_tensors);
  }
  if (request.runs.empty()) {
    return "no runs";
  }
  unsigned __int128 total = 0;
  for (const SideRun& run : request.runs) {
    if (std::string why = check_run(run, tensor_bytes); !why.empty()) {
      return why;
    }
    total += static_cast<unsigned __int128>(run.bytes) * run.count;
  }
  total *= request.tensor_stop - request.tensor_start;
  if (total >> 62 != 0) {
    return "more bytes than can be counted";
  }
  const auto limit = static_cast<std::uint64_t>(total);
  if (request.num_bytes == 0 || request.num_bytes > limit || request.first_byte > limit - request.num_bytes) {
    return std::to_string(request.num_bytes) + " bytes from " + std::to_string(request.first_byte) + " of " +
           std::to_string(limit);
  }
  return {};
}

std::uint64_t bytes_per_tensor(std::span<const SideRun> runs) {
  std::uint64_t total = 0;
  for (const SideRun& run : runs) {
    total += run.bytes * run.count;
  }
  return total;
}

}  // namespace pd
