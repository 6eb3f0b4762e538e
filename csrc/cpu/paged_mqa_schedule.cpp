#include <vector>

#include "cpu/paged_mqa_logits.h"

namespace deep_kernels::cpu {
namespace {

// Tiles of a request's longest row.
i32 own_tiles(const PagedMqaScheduleArgs& args, i64 request) {
  const i32* lens = args.context_lens + request * args.context_request_stride;
  i32 longest = 0;
  for (i32 row = 0; row < args.next_n; ++row)
    longest = max_of(longest, paged_row_length(args, lens[row * args.context_row_stride], row));
  return paged_num_tiles(longest);
}

// Whether the row is computed together with the one before.
bool follows(const PagedMqaScheduleArgs& args, i32 row) {
  if (args.indices == nullptr || row >= args.num_requests || !paged_may_follow(row)) return false;
  const i32* index = args.indices + row * args.indices_stride;
  return index[0] == index[-args.indices_stride];
}

std::vector<i32> tiles_of_requests(const PagedMqaScheduleArgs& args) {
  std::vector<i32> tiles(args.num_requests);
  for (i32 request = 0, leader = 0; request < args.num_requests; ++request) {
    if (!follows(args, request)) leader = request;
    tiles[leader] = max_of(tiles[leader], own_tiles(args, request));
  }
  return tiles;
}

}  // namespace

void paged_mqa_schedule(const PagedMqaScheduleArgs& args) {
  const std::vector<i32> tiles = tiles_of_requests(args);
  i64 total = 0;
  for (const i32 num_tiles : tiles) total += paged_request_cost(num_tiles);
  const MqaCutPositions positions(total, args.num_sms);
  i32 request = 0;
  i64 position = 0;  // cost of all requests before `request`
  for (i32 i = 0; i <= args.num_sms; ++i) {
    const i64 target = positions(i);
    while (request < args.num_requests && position + paged_request_cost(tiles[request]) <= target)
      position += paged_request_cost(tiles[request++]);
    const PagedCut cut = request < args.num_requests
                             ? paged_cut_in_request(request, target - position, tiles[request])
                             : PagedCut{args.num_requests, 0};
    args.schedule[2 * i] = cut.request;
    args.schedule[2 * i + 1] = cut.tile;
  }
}

}  // namespace deep_kernels::cpu
