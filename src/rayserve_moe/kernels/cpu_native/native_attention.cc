// The calls of attention that XLA makes: buffers and attributes checked, then handed to the kernels.
#include <string_view>

#include "attention.h"
#include "buffers.h"
#include "checks.h"

namespace {

// Scales of a norm of each head, or of all `width` elements together; false where they fit neither.
bool is_norm(Scales& scale, int64_t num_layers, int64_t head_width, int64_t width) {
  return are_scales(scale) && (is_absent_or(scale, {num_layers, head_width}) || is(scale, {num_layers, width}));
}

native::HeadNorm norm_of(Scales& scale, int64_t layer) {
  const int64_t width = scale.element_count() ? size_of(scale, 1) : 0;
  return {scale_from(scale, layer * width), width};
}

ffi::Error Attention(Bf16 hidden, Bf16 q, Bf16 k, Bf16 v, Bf16 o, Bf16 gate, Scales q_norm, Scales k_norm, Bf16 q_bias, Bf16 k_bias,
                     Bf16 v_bias, Bf16 sinks, F32 mean_squares, F32 cos, F32 sin, S32 kv_slots, S32 positions,
                     S32 page_table, S32 layer, S32 first_page, S32 num_pages, S32 windows, S32 chosen, Bf16 pool,
                     int64_t chosen_size, int64_t num_singles, int64_t value_width, float eps, float scale, float clip, float value_scale,
                     bool is_interleaved, bool norms_after, bool has_softplus, bool norms_values, bool stores_only,
                     ffi::RemainingArgs adapters, ffi::ResultBuffer<ffi::F32> out, ffi::ResultBuffer<ffi::BF16> pool_out) {
  if (!have_dims(2, hidden, page_table, cos) || !have_dims(3, q) || !have_dims(4, pool) ||
      !have_dims(0, layer, first_page, num_pages))
    return wrong("attention takes arrays of other numbers of dimensions");
  native::AttentionShapes s;
  const int64_t at = layer.typed_data()[0], num_layers = size_of(q, 0), begin = first_page.typed_data()[0];
  if (at < 0 || at >= num_layers) return wrong("there is no such layer");
  if (!is_absent_or(windows, {num_layers})) return wrong("each layer has a window");
  const int64_t head_width = size_of(pool, 3) - value_width;
  s.rules = {head_width, size_of(cos, 1), is_interleaved, norms_after, clip, eps, norms_values};
  s.num_tokens = size_of(hidden, 0), s.width = size_of(hidden, 1);
  s.num_kv_heads = size_of(pool, 2), s.page_size = size_of(pool, 1);
  s.value_width = value_width, s.value_scale = value_scale;
  s.num_heads = native::times(head_width, size_of(q, 2)), s.num_pages = num_pages.typed_data()[0];
  s.num_singles = num_singles, s.num_blocks = size_of(page_table, 0) - num_singles;
  s.block_tokens = s.num_blocks ? native::times(s.num_blocks, s.num_tokens - num_singles) : 0;
  s.table_width = size_of(page_table, 1), s.scale = scale;
  s.window = windows.element_count() ? windows.typed_data()[at] : 0;
  s.num_chosen = chosen.element_count() && chosen.dimensions().size() == 3 ? size_of(chosen, 2) : 0;
  s.chosen_size = chosen_size, s.stores_only = stores_only;
  if (!is_absent_or(chosen, {s.num_tokens, s.num_kv_heads, s.num_chosen}) || (s.num_chosen > 0 && chosen_size < 1))
    return wrong("attention has no such blocks of keys");
  if (!native::fit(s)) return wrong("attention has no such heads, pages, blocks or widths");
  if (begin < 0 || s.num_pages > size_of(pool, 0) - begin) return wrong("the pool has no such pages");
  const int64_t q_width = s.q_width(), k_width = s.k_width(), v_width = s.v_width(), out_width = s.out_width();
  if (!is(q, {num_layers, s.width, q_width}) || !is(k, {num_layers, s.width, k_width}) ||
      !is(v, {num_layers, s.width, v_width}) || !is(o, {num_layers, out_width, s.width}) ||
      (!is_absent_or(gate, {num_layers, s.width, out_width}) && !is(gate, {num_layers, s.width, s.num_heads})) ||
      !is_norm(q_norm, num_layers, head_width, q_width) || !is_norm(k_norm, num_layers, head_width, k_width) ||
      !is_absent_or(q_bias, {num_layers, q_width}) || !is_absent_or(k_bias, {num_layers, k_width}) ||
      !is_absent_or(v_bias, {num_layers, v_width}) || !is_absent_or(sinks, {num_layers, s.num_heads}))
    return wrong("weights of attention do not fit each other");
  if (!is(cos, {s.num_tokens, s.rules.rotated_pairs}) || !is(sin, {s.num_tokens, s.rules.rotated_pairs}) ||
      !is(kv_slots, {s.num_tokens}) || !is(positions, {s.num_tokens}) || !is(*out, {s.num_tokens, s.width}) ||
      !is_absent_or(mean_squares, {s.num_tokens, 2}))
    return wrong("attention has other numbers of tokens");
  if (pool_out->untyped_data() != pool.untyped_data()) return wrong("the pool must be updated in place");
  native::AttentionArrays a;
  a.hidden = numbers(hidden);
  a.q = of_layer(q, at), a.k = of_layer(k, at), a.v = of_layer(v, at), a.o = of_layer(o, at);
  a.gate = of_layer(gate, at);
  s.gate_width = gate.element_count() ? size_of(gate, 2) : 0, s.has_softplus = has_softplus;
  a.q_norm = norm_of(q_norm, at), a.k_norm = norm_of(k_norm, at);
  a.q_bias = of_layer(q_bias, at), a.k_bias = of_layer(k_bias, at), a.v_bias = of_layer(v_bias, at);
  a.sinks = of_layer(sinks, at);
  a.cos = cos.typed_data(), a.sin = sin.typed_data();
  a.mean_squares = mean_squares.element_count() ? mean_squares.typed_data() : nullptr;
  a.kv_slots = kv_slots.typed_data(), a.positions = positions.typed_data(), a.page_table = page_table.typed_data();
  a.chosen = chosen.element_count() ? chosen.typed_data() : nullptr;
  a.pool = reinterpret_cast<native::bf16*>(pool_out->untyped_data()) + begin * s.page_size * s.row_width();
  a.out = out->typed_data();
  if (!native::are_in_pool(s, a)) return wrong("a token's position, slot or page lies outside the pool");
  AdapterArguments given(adapters, at, s.num_tokens);
  given.read(a.q_adapters, s.width, q_width), given.read(a.k_adapters, s.width, k_width);
  given.read(a.v_adapters, s.width, v_width), given.read(a.gate_adapters, s.width, s.gate_width);
  given.read(a.o_adapters, out_width, s.width);
  if (given.are_wrong()) return wrong("adapters of attention do not fit its weights");
  native::attention_layer(s, a);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoeAttention, Attention,
                              ffi::Ffi::Bind()
                                  .Arg<Bf16>().Arg<Bf16>().Arg<Bf16>().Arg<Bf16>().Arg<Bf16>()
                                  .Arg<Bf16>().Arg<Scales>().Arg<Scales>().Arg<Bf16>().Arg<Bf16>()
                                  .Arg<Bf16>().Arg<Bf16>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<S32>().Arg<S32>()
                                  .Arg<S32>().Arg<S32>().Arg<S32>().Arg<S32>().Arg<S32>().Arg<S32>()
                                  .Arg<Bf16>().Attr<int64_t>("chosen_size").Attr<int64_t>("num_singles").Attr<int64_t>("value_width").Attr<float>("eps")
                                  .Attr<float>("scale").Attr<float>("clip").Attr<float>("value_scale")
                                  .Attr<bool>("is_interleaved").Attr<bool>("norms_after").Attr<bool>("has_softplus")
                                  .Attr<bool>("norms_values").Attr<bool>("stores_only").RemainingArgs()
                                  .Ret<F32>().Ret<Bf16>());
