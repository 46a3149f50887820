// SPDX-License-Identifier: Apache-2.0
// The C ABI of copies: codes and texts, and that a refused call changes nothing.
#include <cstdint>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "pd/c_api.h"
#include "testing.h"

namespace {

constexpr std::uint64_t kBlock = 1000;

struct Scene {
  Scene(const Scene&) = delete;
  Scene& operator=(const Scene&) = delete;
  Scene() : src(10 * kBlock), dst(src.size()) {
    for (std::size_t i = 0; i < src.size(); ++i) src[i] = static_cast<unsigned char>(i % 251);
    src_tensor = reinterpret_cast<std::uint64_t>(src.data());
    dst_tensor = reinterpret_cast<std::uint64_t>(dst.data());
    pairs.num_tensors = 1;
    pairs.src_tensors = &src_tensor;
    pairs.dst_tensors = &dst_tensor;
    pairs.src_block_stride = pairs.dst_block_stride = kBlock;
    pairs.num_slices = 1;
    pairs.slices = slice;
    pairs.num_blocks = 2;
    pairs.src_blocks = from;
    pairs.dst_blocks = to;
  }
  bool is_copied() const {
    return std::memcmp(&dst[7 * kBlock], &src[2 * kBlock], kBlock) == 0 &&
           std::memcmp(&dst[1 * kBlock], &src[9 * kBlock], kBlock) == 0;
  }

  std::vector<unsigned char> src, dst;
  std::uint64_t src_tensor, dst_tensor;
  std::int64_t from[2] = {2, 9}, to[2] = {7, 1};
  std::int64_t slice[6] = {0, 0, kBlock, 1, 0, 0};
  pd_block_pairs pairs{};
};

bool says(const char* text) { return std::strstr(pd_last_error(), text) != nullptr; }

}  // namespace

TEST(a_plan_is_built_copied_and_freed) {
  Scene scene;
  pd_plan* plan = pd_plan_create(1);
  CHECK_EQUAL(pd_plan_add(plan, &scene.pairs), 0);
  CHECK_EQUAL(pd_plan_num_bytes(plan), 2 * kBlock);
  CHECK_EQUAL(pd_plan_num_pieces(plan), 2u);
  CHECK_EQUAL(pd_plan_num_runs(plan), 2u);
  CHECK_EQUAL(pd_plan_num_pairs(plan), 2u);
  std::uint32_t copied[2] = {}, wanted[2] = {pd_crc32c(0, &scene.src[2 * kBlock], kBlock), 0};
  wanted[0] = pd_crc32c(0, &wanted[0], 4);
  CHECK_EQUAL(pd_execute(plan, 0, -1, copied, 2), 1);
  CHECK(scene.is_copied());
  CHECK_EQUAL(copied[0], wanted[0]);
  CHECK_EQUAL(pd_checksum(plan, 1, wanted, 2), 0);
  CHECK_EQUAL(copied[1], wanted[1]);
  pd_plan_free(plan);
}

TEST(one_call_plans_and_copies) {
  Scene scene;
  CHECK_EQUAL(pd_copy_blocks(&scene.pairs, 2, 60000), 1);
  CHECK(scene.is_copied());
  Scene other;
  other.pairs.num_blocks = 0;
  other.pairs.src_blocks = other.pairs.dst_blocks = nullptr;
  const pd_block_pairs* one[] = {&other.pairs};
  CHECK_EQUAL(pd_copy_groups(one, 1, 2, other.from, other.to, 1, -1), 1);
  CHECK(other.is_copied());
}

TEST(several_groups_are_copied_in_one_call) {
  Scene first, second;
  const pd_block_pairs* both[] = {&first.pairs, &second.pairs};
  CHECK_EQUAL(pd_copy_groups(both, 2, 2, first.from, first.to, 1, -1), 1);
  CHECK(first.is_copied());
  CHECK(second.is_copied());
  CHECK_EQUAL(pd_copy_groups(nullptr, 1, 2, first.from, first.to, 1, -1), PD_ERROR_INVALID);
  CHECK(says("groups without an array"));
  const pd_block_pairs* none[] = {nullptr};
  CHECK_EQUAL(pd_copy_groups(none, 1, 2, first.from, first.to, 1, -1), PD_ERROR_INVALID);
  CHECK(says("no block pairs"));
}

TEST(a_deadline_in_the_past_copies_nothing_and_a_distant_one_is_none) {
  Scene scene;
  CHECK_EQUAL(pd_copy_blocks(&scene.pairs, 0, 0), 3);
  CHECK(!scene.is_copied());
  CHECK_EQUAL(pd_copy_blocks(&scene.pairs, 0, std::numeric_limits<std::int64_t>::max()), 1);
  CHECK(scene.is_copied());
}

TEST(wrong_arguments_are_named) {
  Scene scene;
  CHECK_EQUAL(pd_copy_blocks(&scene.pairs, 3, -1), PD_ERROR_INVALID);
  CHECK(says("stores must be"));
  CHECK_EQUAL(pd_copy_blocks(nullptr, 0, -1), PD_ERROR_INVALID);
  CHECK(says("no block pairs"));
  scene.to[1] = -5;
  CHECK_EQUAL(pd_copy_blocks(&scene.pairs, 0, -1), PD_ERROR_INVALID);
  CHECK(says("negative block id"));
  Scene other;
  other.slice[2] = -1;
  CHECK_EQUAL(pd_copy_blocks(&other.pairs, 0, -1), PD_ERROR_INVALID);
  CHECK(says("negative offset, size or count"));
  CHECK_EQUAL(pd_plan_add(nullptr, &scene.pairs), PD_ERROR_INVALID);
  CHECK_EQUAL(pd_execute(nullptr, 0, -1, nullptr, 0), PD_ERROR_INVALID);
  CHECK(says("no plan"));
  const std::int32_t cpu = 100000;
  CHECK(pd_pool_create(1, &cpu, 1) == nullptr);
  CHECK(says("CPU 100000"));
  CHECK(pd_submit(nullptr, nullptr, 0, -1, nullptr, 0) == nullptr);
}

TEST(errors_belong_to_their_thread) {
  CHECK_EQUAL(pd_execute(nullptr, 0, -1, nullptr, 0), PD_ERROR_INVALID);
  std::string other = "unset";
  std::thread([&] { other = pd_last_error(); }).join();
  CHECK_EQUAL(other, std::string());
  CHECK(says("no plan"));
}

TEST(a_plan_without_checksums_takes_no_places) {
  Scene scene;
  pd_plan* plan = pd_plan_create(0);
  CHECK_EQUAL(pd_plan_add(plan, &scene.pairs), 0);
  std::uint32_t places[2] = {};
  CHECK_EQUAL(pd_execute(plan, 0, -1, places, 2), PD_ERROR_INVALID);
  CHECK(says("2 places"));
  CHECK_EQUAL(pd_execute(plan, 0, -1, nullptr, 0), 1);
  pd_plan_free(plan);
}

TEST(a_job_is_polled_waited_for_and_freed) {
  Scene scene;
  pd_pool* pool = pd_pool_create(1, nullptr, 0);
  pd_plan* plan = pd_plan_create(0);
  CHECK_EQUAL(pd_plan_add(plan, &scene.pairs), 0);
  pd_job* job = pd_submit(pool, plan, 0, -1, nullptr, 0);
  pd_plan_free(plan);  // the job keeps it
  CHECK_EQUAL(pd_job_wait(job, -1), 1);
  CHECK_EQUAL(pd_job_poll(job), 1);
  CHECK(scene.is_copied());
  pd_job_free(job);
  pd_job_free(nullptr);
  pd_pool_free(pool);
}

TEST(a_freed_job_touches_nothing_any_more) {
  pd_pool* pool = pd_pool_create(1, nullptr, 0);
  for (int round = 0; round < 100; ++round) {
    Scene scene;
    pd_plan* plan = pd_plan_create(0);
    CHECK_EQUAL(pd_plan_add(plan, &scene.pairs), 0);
    pd_job_free(pd_submit(pool, plan, 0, -1, nullptr, 0));
    pd_plan_free(plan);
  }  // the scene's memory is gone: ASan and TSan would see a late writer
  pd_pool_free(pool);
}

TEST(versions_and_names_are_given) {
  CHECK_EQUAL(pd_abi_version(), PD_ABI_VERSION);
  CHECK(pd_kernel_name() != nullptr);
  CHECK(pd_crc32c_name() != nullptr);
}
