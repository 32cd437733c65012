// The call of multi-head latent attention: its buffers checked, then handed to the kernel.

#include "buffers.h"
#include "checks.h"
#include "latent.h"

namespace {

ffi::Error Latent(Bf16 hidden, Bf16 q_a, Bf16 q_b, Bf16 kv_a, Bf16 k_b, Bf16 v_b, Bf16 o, Bf16 q_a_norm, Bf16 kv_a_norm,
                  Bf16 q_a_bias, Bf16 kv_a_bias, F32 cos, F32 sin, S32 kv_slots, S32 positions, S32 page_table,
                  S32 layer, S32 first_page, S32 num_pages, F32 query_scale, S32 chosen, Bf16 gate, Bf16 pool,
                  int64_t num_singles, int64_t nope_dim, float norm_eps, float scale, bool is_interleaved,
                  bool stores_only, ffi::RemainingArgs adapters, ffi::ResultBuffer<ffi::F32> out,
                  ffi::ResultBuffer<ffi::BF16> pool_out) {
  if (!have_dims(2, hidden, page_table, kv_a_norm) || !have_dims(3, o, k_b, v_b) || !have_dims(4, pool) ||
      !have_dims(0, layer, first_page, num_pages))
    return wrong("latent attention takes arrays of other numbers of dimensions");
  const int64_t at = layer.typed_data()[0], num_layers = size_of(o, 0), begin = first_page.typed_data()[0];
  if (at < 0 || at >= num_layers) return wrong("there is no such layer");
  native::LatentShapes s{};
  s.nope = nope_dim, s.latent = size_of(kv_a_norm, 1), s.rope = size_of(pool, 3) - s.latent;
  s.query_latent = q_a.element_count() && q_a.dimensions().size() == 3 ? size_of(q_a, 2) : 0;
  s.norm_eps = norm_eps, s.is_interleaved = is_interleaved;
  native::AttentionShapes& b = s.batch;
  b.num_tokens = size_of(hidden, 0), b.width = size_of(hidden, 1), b.num_heads = native::times(nope_dim, size_of(k_b, 1));
  s.value = native::times(b.num_heads, size_of(v_b, 1));
  b.page_size = size_of(pool, 1), b.num_pages = num_pages.typed_data()[0], b.table_width = size_of(page_table, 1);
  b.stores_only = stores_only;
  b.num_singles = num_singles, b.num_blocks = size_of(page_table, 0) - num_singles, b.scale = scale;
  b.block_tokens = b.num_blocks ? native::times(b.num_blocks, b.num_tokens - num_singles) : 0;
  if (!native::fit(s)) return wrong("latent attention has no such heads, pages, blocks or widths");
  if (begin < 0 || b.num_pages > size_of(pool, 0) - begin) return wrong("the pool has no such pages");
  const int64_t depth = s.query_latent ? s.query_latent : b.width, half = s.rope / 2;
  if (!is_absent_or(q_a, {num_layers, b.width, s.query_latent}) || !is(q_b, {num_layers, depth, s.heads() * s.head()}) ||
      !is(kv_a, {num_layers, b.width, s.cached()}) || !is(k_b, {num_layers, s.heads() * s.nope, s.latent}) ||
      !is(v_b, {num_layers, s.heads() * s.value, s.latent}) || !is(o, {num_layers, s.heads() * s.value, b.width}) ||
      !is(kv_a_norm, {num_layers, s.latent}) || !is_absent_or(kv_a_bias, {num_layers, s.cached()}) ||
      (s.query_latent && !is(q_a_norm, {num_layers, s.query_latent})) ||
      !is_absent_or(q_a_bias, {num_layers, s.query_latent}) || !is_absent_or(gate, {num_layers, b.width, s.heads()}) ||
      !is(pool, {size_of(pool, 0), b.page_size, 1, s.cached()}))
    return wrong("weights of latent attention do not fit each other");
  if (!is(cos, {b.num_tokens, half}) || !is(sin, {b.num_tokens, half}) || !is(kv_slots, {b.num_tokens}) ||
      !is(positions, {b.num_tokens}) || !is_absent_or(query_scale, {b.num_tokens}) ||
      !is(*out, {b.num_tokens, b.width}))
    return wrong("latent attention has other numbers of tokens");
  if (!is_absent_or(chosen, {b.num_tokens, chosen.dimensions().back()}))
    return wrong("latent attention has choices of other numbers of tokens");
  if (pool_out->untyped_data() != pool.untyped_data()) return wrong("the pool must be updated in place");
  native::AttentionArrays places{};
  places.kv_slots = kv_slots.typed_data(), places.positions = positions.typed_data();
  places.page_table = page_table.typed_data();
  if (!native::are_in_pool(b, places)) return wrong("a token's position, slot or page lies outside the pool");
  const int64_t num_chosen = chosen.element_count() ? size_of(chosen, 1) : 0;
  for (int64_t i = 0; i < num_chosen * b.num_tokens; ++i) {
    const int64_t position = places.positions[i / num_chosen];
    if (position >= 0 && (chosen.typed_data()[i] > position || (i % num_chosen == 0 && chosen.typed_data()[i] < 0)))
      return wrong("a token sees chosen positions up to its own, at least one");
  }
  native::LatentArrays arrays{numbers(hidden), of_layer(q_a, at), of_layer(q_b, at), of_layer(kv_a, at), of_layer(k_b, at),
      of_layer(v_b, at), of_layer(o, at), of_layer(q_a_norm, at), of_layer(kv_a_norm, at), of_layer(q_a_bias, at),
      of_layer(kv_a_bias, at), cos.typed_data(), sin.typed_data(), places.kv_slots, places.positions,
      places.page_table, query_scale.element_count() ? query_scale.typed_data() : nullptr,
      num_chosen ? chosen.typed_data() : nullptr, num_chosen,
      reinterpret_cast<native::bf16*>(pool_out->untyped_data()) + begin * b.page_size * s.cached(),
      out->typed_data(), gate.element_count() ? of_layer(gate, at) : nullptr};
  AdapterArguments given(adapters, at, b.num_tokens);
  given.read(arrays.q_a_adapters, b.width, s.query_latent), given.read(arrays.q_b_adapters, depth, s.heads() * s.head());
  given.read(arrays.kv_a_adapters, b.width, s.cached()), given.read(arrays.k_b_adapters, s.latent, s.heads() * s.nope);
  given.read(arrays.v_b_adapters, s.latent, s.heads() * s.value);
  given.read(arrays.o_adapters, s.heads() * s.value, b.width), given.read(arrays.gate_adapters, b.width, s.heads());
  if (given.are_wrong()) return wrong("adapters of latent attention do not fit its weights");
  native::latent_attention_layer(s, arrays);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoeLatent, Latent,
                              ffi::Ffi::Bind()
                                  .Arg<Bf16>().Arg<Bf16>().Arg<Bf16>().Arg<Bf16>().Arg<Bf16>().Arg<Bf16>().Arg<Bf16>()
                                  .Arg<Bf16>().Arg<Bf16>().Arg<Bf16>().Arg<Bf16>().Arg<F32>().Arg<F32>().Arg<S32>()
                                  .Arg<S32>().Arg<S32>().Arg<S32>().Arg<S32>().Arg<S32>().Arg<F32>().Arg<S32>().Arg<Bf16>()
                                  .Arg<Bf16>().Attr<int64_t>("num_singles").Attr<int64_t>("nope_dim").Attr<float>("norm_eps")
                                  .Attr<float>("scale").Attr<bool>("is_interleaved").Attr<bool>("stores_only").RemainingArgs().Ret<F32>().Ret<Bf16>());
