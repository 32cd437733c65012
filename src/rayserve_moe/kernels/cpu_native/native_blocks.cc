// The call of the index of block-sparse attention: its buffers checked, then handed to the kernel.

#include "block_index.h"
#include "buffers.h"
#include "checks.h"

namespace {

ffi::Error Blocks(Bf16 hidden, Bf16 q, Bf16 k, Scales q_norm, Scales k_norm, F32 cos, F32 sin, S32 kv_slots,
                  S32 positions, S32 page_table, S32 layer, S32 first_page, S32 num_pages, Bf16 pool,
                  int64_t num_singles, int64_t block_size, int64_t first_blocks, int64_t local_blocks, float eps,
                  bool is_interleaved, ffi::ResultBuffer<ffi::S32> chosen, ffi::ResultBuffer<ffi::BF16> pool_out) {
  if (!have_dims(2, hidden, page_table, q_norm, k_norm, cos, sin) || !have_dims(3, q, k, *chosen) ||
      !have_dims(4, pool) || !have_dims(0, layer, first_page, num_pages))
    return wrong("an index of blocks takes arrays of other numbers of dimensions");
  const int64_t at = layer.typed_data()[0], num_layers = size_of(k, 0), begin = first_page.typed_data()[0];
  if (at < 0 || at >= num_layers) return wrong("there is no such layer");
  native::BlockIndexShapes s{};
  s.head = size_of(k, 2), s.pairs = size_of(cos, 1), s.top_k = size_of(*chosen, 2);
  s.block_size = block_size, s.first_blocks = first_blocks, s.local_blocks = local_blocks;
  s.eps = eps, s.is_interleaved = is_interleaved;
  native::AttentionShapes& b = s.batch;
  b.num_tokens = size_of(hidden, 0), b.width = size_of(hidden, 1), b.num_heads = size_of(*chosen, 1);
  b.page_size = size_of(pool, 1), b.num_pages = num_pages.typed_data()[0], b.table_width = size_of(page_table, 1);
  b.num_singles = num_singles, b.num_blocks = size_of(page_table, 0) - num_singles;
  b.block_tokens = b.num_blocks ? native::times(b.num_blocks, b.num_tokens - num_singles) : 0;
  const auto is_even = [](int64_t width) { return width > 0 && width % 2 == 0; };
  if (!native::are_blocks(b) || !is_even(b.width) || !is_even(s.head) || b.num_heads < 1 || s.top_k < 1 ||
      2 * s.pairs > s.head || block_size < 1 || first_blocks < 0 || local_blocks < 0)
    return wrong("an index of blocks has no such heads, pages, blocks or widths");
  if (begin < 0 || b.num_pages > size_of(pool, 0) - begin) return wrong("the pool has no such pages");
  if (!is(q, {num_layers, b.width, s.heads() * s.head}) || !is(k, {num_layers, b.width, s.head}) ||
      !is(q_norm, {num_layers, s.head}) || !is(k_norm, {num_layers, s.head}) || !are_scales(q_norm) ||
      !are_scales(k_norm) || !is(pool, {size_of(pool, 0), b.page_size, 1, s.head}))
    return wrong("weights of an index of blocks do not fit each other");
  if (!is(cos, {b.num_tokens, s.pairs}) || !is(sin, {b.num_tokens, s.pairs}) || !is(kv_slots, {b.num_tokens}) ||
      !is(positions, {b.num_tokens}) || !is(*chosen, {b.num_tokens, s.heads(), s.top_k}))
    return wrong("an index of blocks has other numbers of tokens");
  if (pool_out->untyped_data() != pool.untyped_data()) return wrong("the pool must be updated in place");
  native::AttentionArrays places{};
  places.kv_slots = kv_slots.typed_data(), places.positions = positions.typed_data();
  places.page_table = page_table.typed_data();
  if (!native::are_in_pool(b, places)) return wrong("a token's position, slot or page lies outside the pool");
  native::choose_blocks(
      s, {numbers(hidden), of_layer(q, at), of_layer(k, at), scale_from(q_norm, at * s.head),
          scale_from(k_norm, at * s.head), cos.typed_data(), sin.typed_data(), places.kv_slots, places.positions,
          places.page_table, reinterpret_cast<native::bf16*>(pool_out->untyped_data()) + begin * b.page_size * s.head,
          chosen->typed_data()});
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoeBlocks, Blocks,
                              ffi::Ffi::Bind()
                                  .Arg<Bf16>().Arg<Bf16>().Arg<Bf16>().Arg<Scales>().Arg<Scales>().Arg<F32>()
                                  .Arg<F32>().Arg<S32>().Arg<S32>().Arg<S32>().Arg<S32>().Arg<S32>().Arg<S32>()
                                  .Arg<Bf16>().Attr<int64_t>("num_singles").Attr<int64_t>("block_size")
                                  .Attr<int64_t>("first_blocks").Attr<int64_t>("local_blocks").Attr<float>("eps")
                                  .Attr<bool>("is_interleaved").Ret<S32>().Ret<Bf16>());
