// The call of layers with a delta rule: its buffers checked, then handed to the kernel.
#include "buffers.h"
#include "checks.h"
#include "gated_delta.h"

namespace {

using Pool = ffi::Result<ffi::Buffer<ffi::F32>>;

// Elements of layer `layer` of an array that holds equally many of each layer.
template <class Buffer>
auto* layer_of(Buffer& stacked, int64_t layer, int64_t num_layers) {
  return stacked.typed_data() + layer * (int64_t(stacked.element_count()) / num_layers);
}

ffi::Error Delta(Bf16 hidden, Bf16 q, Bf16 k, Bf16 v, Bf16 z, Bf16 b, Bf16 a, Bf16 o, Bf16 q_taps, Bf16 k_taps,
                 Bf16 v_taps, F32 log_decay, F32 decay_bias, F32 norm, Bf16 a_in, Bf16 z_in, S32 pieces, S32 layer,
                 F32 state, F32 window, F32 keys, F32 fresh, F32 decay, F32 inputs, float eps, float decay_floor,
                 bool rounds_decays, bool has_sigmoid, ffi::ResultBuffer<ffi::F32> out, Pool state_out,
                 Pool window_out, Pool keys_out, Pool fresh_out, Pool decay_out, Pool inputs_out) {
  if (!have_dims(2, hidden, pieces) || !have_dims(3, q, v, o, a_in) ||
      !have_dims(4, q_taps, k_taps, v_taps, state, window, keys, fresh, decay, inputs) || !have_dims(0, layer))
    return wrong("a gated delta layer takes arrays of other numbers of dimensions");
  native::DeltaShapes s;
  const int64_t at = layer.typed_data()[0], num_layers = size_of(q, 0);
  if (at < 0 || at >= num_layers) return wrong("there is no such layer");
  s.num_tokens = size_of(hidden, 0), s.width = size_of(hidden, 1), s.eps = eps;
  s.num_heads = size_of(state, 1), s.key_width = size_of(state, 2), s.value_width = size_of(state, 3);
  s.num_key_heads = size_of(keys, 2), s.num_taps = size_of(q_taps, 1), s.num_pieces = size_of(pieces, 0);
  s.num_entries = native::times(num_layers, size_of(state, 0)), s.num_rows = native::times(num_layers, size_of(keys, 0));
  s.num_decays = size_of(decay, 3), s.rank = size_of(a_in, 2);
  s.decay_floor = decay_floor, s.rounds_decays = rounds_decays, s.has_sigmoid = has_sigmoid;
  if (s.num_decays != s.key_width && (s.num_decays != 1 || decay_floor != 0 || rounds_decays))
    return wrong("a head has one decay, or one per element of a key");
  if (native::times(s.num_key_heads, s.num_heads) < 0 || s.key_width <= 0 || s.value_width <= 0 || s.width % 2 || s.rank % 2 ||
      s.v_width() % 2 || s.num_taps < 2 || s.num_taps > native::kWindowRows / 2 || s.num_entries < 0 || s.num_rows < 0)
    return wrong("a gated delta layer has no such heads, widths or taps");
  const int64_t q_width = s.q_width(), v_width = s.v_width(), heads = s.num_heads, rows = num_layers * s.num_rows;
  const int64_t decays = heads * s.num_decays, depth = s.rank ? s.rank : s.width;
  if (!is(q, {num_layers, s.width, q_width}) || !is(k, {num_layers, s.width, q_width}) ||
      !is(v, {num_layers, s.width, v_width}) || !is(z, {num_layers, depth, v_width}) ||
      !is(b, {num_layers, s.width, heads}) || !is(a, {num_layers, depth, decays}) ||
      !is_absent_or(a_in, {num_layers, s.width, s.rank}) || !is_absent_or(z_in, {num_layers, s.width, s.rank}) ||
      a_in.element_count() != z_in.element_count() ||
      !is(o, {num_layers, v_width, s.width}) || !is(q_taps, {num_layers, s.num_taps, 1, q_width}) ||
      !is(k_taps, {num_layers, s.num_taps, 1, q_width}) || !is(v_taps, {num_layers, s.num_taps, 1, v_width}) ||
      !is(log_decay, {num_layers, heads}) || !is(decay_bias, {num_layers, decays}) ||
      !is(norm, {num_layers, s.value_width}))
    return wrong("weights of a gated delta layer do not fit each other");
  if (!is(window, {size_of(state, 0), s.num_taps - 1, s.num_key_heads, s.channels()}) ||
      !is(keys, {rows, native::kChunk, s.num_key_heads, s.key_width}) ||
      !is(fresh, {rows, native::kChunk, heads, s.value_width}) || !is(decay, {rows, native::kChunk, heads, s.num_decays}) ||
      !is(inputs, {rows, native::kWindowRows, s.num_key_heads, s.channels()}))
    return wrong("entries and rings of a gated delta layer do not fit each other");
  if (size_of(pieces, 1) != 8 || !is(*out, {s.num_tokens, s.width})) return wrong("a piece has eight numbers");
  const auto is_in_place = [](F32& pool, Pool& result) { return pool.untyped_data() == result->untyped_data(); };
  if (!is_in_place(state, state_out) || !is_in_place(window, window_out) || !is_in_place(keys, keys_out) ||
      !is_in_place(fresh, fresh_out) || !is_in_place(decay, decay_out) || !is_in_place(inputs, inputs_out))
    return wrong("entries and rings must be updated in place");
  const auto* const cut = reinterpret_cast<const native::DeltaPiece*>(pieces.typed_data());
  if (!native::are_in_pools(s, cut)) return wrong("a piece, its row or its entry lies outside the step or the pools");
  const auto here = [&](Bf16& stacked) { return of_layer(stacked, at); };
  const auto part = [&](auto& stacked) { return layer_of(stacked, at, num_layers); };
  native::delta_layer(
      s, {here(q), here(k), here(v), here(z), here(b), here(a), here(o), here(q_taps), here(k_taps), here(v_taps),
          part(log_decay), part(decay_bias), part(norm), here(a_in), here(z_in)},
      {part(*state_out), part(*window_out), part(*keys_out), part(*fresh_out),
       part(*decay_out), part(*inputs_out)},
      numbers(hidden), cut, out->typed_data());
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoeDelta, Delta,
                              ffi::Ffi::Bind()
                                  .Arg<Bf16>().Arg<Bf16>().Arg<Bf16>().Arg<Bf16>().Arg<Bf16>().Arg<Bf16>()
                                  .Arg<Bf16>().Arg<Bf16>().Arg<Bf16>().Arg<Bf16>().Arg<Bf16>()
                                  .Arg<F32>().Arg<F32>().Arg<F32>().Arg<Bf16>().Arg<Bf16>().Arg<S32>().Arg<S32>()
                                  .Arg<F32>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<F32>()
                                  .Attr<float>("eps").Attr<float>("decay_floor")
                                  .Attr<bool>("rounds_decays").Attr<bool>("has_sigmoid")
                                  .Ret<F32>().Ret<F32>().Ret<F32>().Ret<F32>().Ret<F32>().Ret<F32>().Ret<F32>());
