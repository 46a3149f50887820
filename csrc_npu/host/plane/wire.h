// SPDX-License-Identifier: Apache-2.0
// The frames of an established link (protocol 2), little-endian, bounded. Pure: bytes in, bytes out.
//
// A request names a range of tensors of one cache and runs that are the same in each of them; together they are one
// logical stream of bytes (tensor by tensor, run by run, piece by piece), of which a connection moves one part.
//
//   Read  -> Reply(status, n), then n bytes
//   Write -> Reply(status), then the asker sends its bytes, -> Reply(status)
//   Bye   the sender tears the link down in an orderly way
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace pd {

inline constexpr std::uint32_t kFrameMagic = 0x32444450;  // "PDD2"
inline constexpr std::size_t kHeaderBytes = 16;
inline constexpr std::size_t kRequestBytes = 40;  // before its runs
inline constexpr std::size_t kRunBytes = 32;
inline constexpr std::size_t kMaxRuns = 65536;
inline constexpr std::size_t kReplyBytes = 16;  // before its reason
inline constexpr std::size_t kMaxReasonBytes = 256;
inline constexpr std::size_t kMaxBodyBytes = kRequestBytes + kMaxRuns * kRunBytes;

// Codes of the interface that a server answers with. Source: datadist-api.md §3.1.
inline constexpr std::uint32_t kStatusOk = 0;
inline constexpr std::uint32_t kStatusNoCache = 0x5010B002;
inline constexpr std::uint32_t kStatusInvalid = 0x5010B005;

enum class FrameKind : std::uint32_t { kRead = 1, kWrite = 2, kReply = 3, kBye = 4 };

struct FrameHeader {
  FrameKind kind = FrameKind::kBye;
  std::uint32_t body_bytes = 0;
  std::uint32_t sequence = 0;  // of the request that it is or answers, per connection
};

// `count` pieces of `bytes`, the first at `offset`, each next one `stride` further. One side of a transfer.
struct SideRun {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::uint64_t count = 1;
  std::int64_t stride = 0;
};

struct Request {
  bool is_write = false;
  std::int64_t cache_id = 0;
  std::uint64_t first_byte = 0;  // of the logical stream
  std::uint64_t num_bytes = 0;
  std::uint32_t tensor_start = 0;
  std::uint32_t tensor_stop = 0;
  std::vector<SideRun> runs;
};

struct Reply {
  std::uint64_t num_bytes = 0;
  std::uint32_t status = kStatusOk;
  std::string reason;
};

std::vector<std::byte> encode_request(const Request& request, std::uint32_t sequence);
std::vector<std::byte> encode_reply(const Reply& reply, std::uint32_t sequence);
std::vector<std::byte> encode_bye();

// nullopt: not a frame of this protocol, or longer than its kind allows.
std::optional<FrameHeader> decode_header(std::span<const std::byte, kHeaderBytes> bytes);
// nullopt: lengths that do not fit together.
std::optional<Request> decode_request(const FrameHeader& header, std::span<const std::byte> body);
std::optional<Reply> decode_reply(std::span<const std::byte> body);

// Why a request does not fit a cache of that shape; empty: it does. Nothing overflows, whatever the peer says.
std::string check_request(const Request& request, std::size_t num_tensors, std::uint64_t tensor_bytes);

// Bytes of all pieces of all runs in one tensor; the runs must have been checked.
std::uint64_t bytes_per_tensor(std::span<const SideRun> runs);

}  // namespace pd
