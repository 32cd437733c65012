// The call of layers with a delta rule: its buffers checked, then handed to the kernel.
#include "pool_buffers.h"

namespace {

ffi::Error Delta(Bf16 hidden, Bf16 q, Bf16 k, Bf16 v, Bf16 z, Bf16 b, Bf16 a, Bf16 o, Bf16 q_taps, Bf16 k_taps,
                 Bf16 v_taps, F32 log_decay, F32 decay_bias, F32 norm, Bf16 a_in, Bf16 z_in, S32 pieces, S32 layer,
                 F32 state, F32 window, F32 keys, F32 fresh, F32 decay, F32 inputs, float eps, float decay_floor,
                 bool rounds_decays, bool has_sigmoid, ffi::ResultBuffer<ffi::F32> out, Pool state_out,
                 Pool window_out, Pool keys_out, Pool fresh_out, Pool decay_out, Pool inputs_out) {
  if (!have_dims(2, hidden, pieces) || !have_dims(3, q, v, o, a_in) ||
      !have_dims(4, q_taps, k_taps, v_taps, state, window, keys, fresh, decay, inputs) || !have_dims(0, layer))
    return wrong("a gated delta layer takes arrays of other numbers of dimensions");
  native::DeltaShapes s;
  const PoolBuffers pools{state,     window,     keys,     fresh,     decay,     inputs,
                          state_out, window_out, keys_out, fresh_out, decay_out, inputs_out};
  const int64_t at = layer.typed_data()[0], num_layers = size_of(q, 0);
  if (at < 0 || at >= num_layers) return wrong("there is no such layer");
  s.num_tokens = size_of(hidden, 0), s.width = size_of(hidden, 1), s.eps = eps;
  s.num_taps = size_of(q_taps, 1), s.num_pieces = size_of(pieces, 0);
  pools.read_sizes(s, num_layers);
  s.num_decays = size_of(decay, 3), s.rank = size_of(a_in, 2);
  s.decay_floor = decay_floor, s.rounds_decays = rounds_decays, s.has_sigmoid = has_sigmoid;
  if (s.num_decays != s.key_width && (s.num_decays != 1 || decay_floor != 0 || rounds_decays))
    return wrong("a head has one decay, or one per element of a key");
  if (!are_sizes(s)) return wrong("a gated delta layer has no such heads, widths or taps");
  const int64_t q_width = s.q_width(), v_width = s.v_width(), heads = s.num_heads, decays = heads * s.num_decays;
  const int64_t depth = s.rank ? s.rank : s.width;
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
  if (!pools.fit(s)) return wrong("entries and rings of a gated delta layer do not fit each other");
  if (size_of(pieces, 1) != 8 || !is(*out, {s.num_tokens, s.width})) return wrong("a piece has eight numbers");
  if (!pools.are_in_place()) return wrong("entries and rings must be updated in place");
  const auto* const cut = reinterpret_cast<const native::DeltaPiece*>(pieces.typed_data());
  if (!native::are_in_pools(s, cut)) return wrong("a piece, its row or its entry lies outside the step or the pools");
  const auto here = [&](Bf16& stacked) { return of_layer(stacked, at); };
  const auto part = [&](auto& stacked) { return layer_of(stacked, at, num_layers); };
  native::delta_layer(
      s, {here(q), here(k), here(v), here(z), here(b), here(a), here(o), here(q_taps), here(k_taps), here(v_taps),
          part(log_decay), part(decay_bias), part(norm), here(a_in), here(z_in)},
      pools.of_layer(at, num_layers), numbers(hidden), cut, out->typed_data());
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
