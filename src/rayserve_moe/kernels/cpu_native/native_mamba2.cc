// The call of Mamba-2 layers: its buffers checked, then handed to the kernel.
#include "mamba2.h"
#include "pool_buffers.h"

namespace {

ffi::Error Mamba2(Bf16 hidden, Bf16 c, Bf16 b, Bf16 x, Bf16 z, Bf16 step, Bf16 o, Bf16 c_taps, Bf16 b_taps, Bf16 x_taps,
                  Bf16 c_bias, Bf16 b_bias, Bf16 x_bias, F32 log_decay, F32 step_bias, F32 skip, F32 norm, S32 pieces,
                  S32 layer, F32 state, F32 window, F32 keys, F32 fresh, F32 decay, F32 inputs, float eps,
                  float min_step, ffi::ResultBuffer<ffi::F32> out, Pool state_out, Pool window_out, Pool keys_out,
                  Pool fresh_out, Pool decay_out, Pool inputs_out) {
  if (!have_dims(2, hidden, pieces, log_decay) || !have_dims(3, c, x, o) ||
      !have_dims(4, c_taps, b_taps, x_taps, state, window, keys, fresh, decay, inputs) || !have_dims(0, layer))
    return wrong("a Mamba-2 layer takes arrays of other numbers of dimensions");
  native::DeltaShapes s;
  const PoolBuffers pools{state,     window,     keys,     fresh,     decay,     inputs,
                          state_out, window_out, keys_out, fresh_out, decay_out, inputs_out};
  const int64_t at = layer.typed_data()[0], num_layers = size_of(c, 0);
  if (at < 0 || at >= num_layers) return wrong("there is no such layer");
  s.num_tokens = size_of(hidden, 0), s.width = size_of(hidden, 1), s.eps = eps;
  s.num_taps = size_of(c_taps, 1), s.num_pieces = size_of(pieces, 0);
  pools.read_sizes(s, num_layers);
  if (!are_sizes(s)) return wrong("a Mamba-2 layer has no such heads, widths or taps");
  const int64_t keys_width = s.q_width(), inner = s.v_width(), heads = s.num_heads;
  if (!is(c, {num_layers, s.width, keys_width}) || !is(b, {num_layers, s.width, keys_width}) ||
      !is(x, {num_layers, s.width, inner}) || !is(z, {num_layers, s.width, inner}) ||
      !is(step, {num_layers, s.width, heads}) || !is(o, {num_layers, inner, s.width}) ||
      !is(c_taps, {num_layers, s.num_taps, 1, keys_width}) || !is(b_taps, {num_layers, s.num_taps, 1, keys_width}) ||
      !is(x_taps, {num_layers, s.num_taps, 1, inner}) || !is_absent_or(c_bias, {num_layers, keys_width}) ||
      !is_absent_or(b_bias, {num_layers, keys_width}) || !is_absent_or(x_bias, {num_layers, inner}) ||
      !is(log_decay, {num_layers, heads}) || !is(step_bias, {num_layers, heads}) || !is(skip, {num_layers, heads}) ||
      !is(norm, {num_layers, inner}))
    return wrong("weights of a Mamba-2 layer do not fit each other");
  if (!pools.fit(s)) return wrong("entries and rings of a Mamba-2 layer do not fit each other");
  if (size_of(pieces, 1) != 8 || !is(*out, {s.num_tokens, s.width})) return wrong("a piece has eight numbers");
  if (!pools.are_in_place()) return wrong("entries and rings must be updated in place");
  const auto* const cut = reinterpret_cast<const native::DeltaPiece*>(pieces.typed_data());
  if (!native::are_in_pools(s, cut)) return wrong("a piece, its row or its entry lies outside the step or the pools");
  const auto here = [&](Bf16& stacked) { return of_layer(stacked, at); };
  const auto part = [&](auto& stacked) { return layer_of(stacked, at, num_layers); };
  native::Mamba2Weights weights;
  native::DeltaWeights& rule = weights.rule;
  rule.q = here(c), rule.k = here(b), rule.v = here(x), rule.z = here(z), rule.b = nullptr, rule.a = here(step);
  rule.o = here(o), rule.q_taps = here(c_taps), rule.k_taps = here(b_taps), rule.v_taps = here(x_taps);
  rule.log_decay = part(log_decay), rule.decay_bias = part(step_bias), rule.norm = part(norm);
  weights.biases = {here(c_bias), here(b_bias), here(x_bias)};
  weights.skip = part(skip), weights.min_step = min_step;
  native::mamba2_layer(s, weights, pools.of_layer(at, num_layers), numbers(hidden), cut, out->typed_data());
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoeMamba2, Mamba2,
                              ffi::Ffi::Bind()
                                  .Arg<Bf16>().Arg<Bf16>().Arg<Bf16>().Arg<Bf16>().Arg<Bf16>().Arg<Bf16>().Arg<Bf16>()
                                  .Arg<Bf16>().Arg<Bf16>().Arg<Bf16>().Arg<Bf16>().Arg<Bf16>().Arg<Bf16>()
                                  .Arg<F32>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<S32>().Arg<S32>()
                                  .Arg<F32>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<F32>()
                                  .Attr<float>("eps").Attr<float>("min_step")
                                  .Ret<F32>().Ret<F32>().Ret<F32>().Ret<F32>().Ret<F32>().Ret<F32>().Ret<F32>());
