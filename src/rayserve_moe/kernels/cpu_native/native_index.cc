// The call of the index of sparse attention: its buffers checked, then handed to the kernel.

#include "buffers.h"
#include "checks.h"
#include "index.h"

namespace {

ffi::Error Index(Bf16 hidden, Bf16 q_a, Bf16 q_a_norm, Bf16 q_a_bias, Bf16 q, Bf16 k, Bf16 k_norm, Bf16 k_norm_bias,
                 F32 weights, F32 cos, F32 sin, S32 kv_slots, S32 positions, S32 page_table, S32 layer, S32 first_page,
                 S32 num_pages, ffi::AnyBuffer pool, int64_t num_singles, float latent_eps, float key_eps, bool is_interleaved,
                 ffi::RemainingArgs adapters,
                 ffi::ResultBuffer<ffi::S32> chosen, ffi::Result<ffi::AnyBuffer> pool_out) {
  if (!have_dims(2, hidden, page_table, q_a_norm, k_norm, k_norm_bias, cos, sin, *chosen) ||
      !have_dims(3, q_a, q, k, weights) || !have_dims(4, pool) || !have_dims(0, layer, first_page, num_pages))
    return wrong("an index takes arrays of other numbers of dimensions");
  const int64_t at = layer.typed_data()[0], num_layers = size_of(k, 0), begin = first_page.typed_data()[0];
  if (at < 0 || at >= num_layers) return wrong("there is no such layer");
  native::IndexShapes s{};
  s.query_latent = size_of(q, 1), s.head = size_of(k, 2), s.pairs = size_of(cos, 1), s.top_k = size_of(*chosen, 1);
  s.latent_eps = latent_eps, s.key_eps = key_eps, s.is_interleaved = is_interleaved;
  native::AttentionShapes& b = s.batch;
  b.num_tokens = size_of(hidden, 0), b.width = size_of(hidden, 1), b.num_heads = size_of(weights, 2);
  b.page_size = size_of(pool, 1), b.num_pages = num_pages.typed_data()[0], b.table_width = size_of(page_table, 1);
  b.num_singles = num_singles, b.num_blocks = size_of(page_table, 0) - num_singles;
  b.block_tokens = b.num_blocks ? native::times(b.num_blocks, b.num_tokens - num_singles) : 0;
  const auto is_even = [](int64_t width) { return width > 0 && width % 2 == 0; };
  if (!native::are_blocks(b) || !is_even(b.width) || !is_even(s.query_latent) || !is_even(s.head) || b.num_heads < 1 ||
      s.top_k < 1 || 2 * s.pairs > s.head)
    return wrong("an index has no such heads, pages, blocks or widths");
  if (begin < 0 || b.num_pages > size_of(pool, 0) - begin) return wrong("the pool has no such pages");
  if (!is(q_a, {num_layers, b.width, s.query_latent}) || !is(q_a_norm, {num_layers, s.query_latent}) ||
      !is_absent_or(q_a_bias, {num_layers, s.query_latent}) || !is(q, {num_layers, s.query_latent, s.heads() * s.head}) ||
      !is(k, {num_layers, b.width, s.head}) || !is(k_norm, {num_layers, s.head}) ||
      !is(k_norm_bias, {num_layers, s.head}) || !is(weights, {num_layers, b.width, s.heads()}) ||
      !is(pool, {size_of(pool, 0), b.page_size, 1, s.head}))
    return wrong("weights of an index do not fit each other");
  if (!is(cos, {b.num_tokens, s.pairs}) || !is(sin, {b.num_tokens, s.pairs}) || !is(kv_slots, {b.num_tokens}) ||
      !is(positions, {b.num_tokens}) || !is(*chosen, {b.num_tokens, s.top_k}))
    return wrong("an index has other numbers of tokens");
  const bool is_narrow = pool.element_type() == ffi::F8E4M3FN;
  if (!is_narrow && pool.element_type() != ffi::BF16) return wrong("keys of an index are bfloat16 or e4m3");
  if (pool_out->untyped_data() != pool.untyped_data()) return wrong("the pool must be updated in place");
  native::AttentionArrays places{};
  places.kv_slots = kv_slots.typed_data(), places.positions = positions.typed_data();
  places.page_table = page_table.typed_data();
  if (!native::are_in_pool(b, places)) return wrong("a token's position, slot or page lies outside the pool");
  const int64_t first = begin * b.page_size * s.head;
  native::IndexArrays arrays{numbers(hidden), of_layer(q_a, at), of_layer(q, at), of_layer(k, at), of_layer(q_a_norm, at),
      of_layer(q_a_bias, at), of_layer(k_norm, at), of_layer(k_norm_bias, at),
      weights.typed_data() + at * b.width * s.heads(), cos.typed_data(), sin.typed_data(), places.kv_slots,
      places.positions, places.page_table,
      is_narrow ? nullptr : static_cast<native::bf16*>(pool_out->untyped_data()) + first,
      is_narrow ? static_cast<native::Fp8*>(pool_out->untyped_data()) + first : nullptr, chosen->typed_data()};
  AdapterArguments given(adapters, at, b.num_tokens);
  given.read(arrays.q_a_adapters, b.width, s.query_latent);
  if (given.are_wrong()) return wrong("adapters of an index do not fit its weights");
  native::choose_tokens(s, arrays);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoeIndex, Index,
                              ffi::Ffi::Bind()
                                  .Arg<Bf16>().Arg<Bf16>().Arg<Bf16>().Arg<Bf16>().Arg<Bf16>().Arg<Bf16>().Arg<Bf16>()
                                  .Arg<Bf16>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<S32>().Arg<S32>().Arg<S32>()
                                  .Arg<S32>().Arg<S32>().Arg<S32>().Arg<ffi::AnyBuffer>().Attr<int64_t>("num_singles")
                                  .Attr<float>("latent_eps").Attr<float>("key_eps").Attr<bool>("is_interleaved")
                                  .RemainingArgs().Ret<S32>().Ret<ffi::AnyBuffer>());
