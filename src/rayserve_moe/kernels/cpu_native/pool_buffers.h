// Buffers of the entries and rings of recurrent layers, checked before a call computes.
#pragma once

#include "buffers.h"
#include "checks.h"
#include "gated_delta.h"

namespace {

using Pool = ffi::ResultBuffer<ffi::F32>;

// Elements of layer `layer` of an array that holds equally many of each layer.
template <class Buffer>
auto* layer_of(Buffer& stacked, int64_t layer, int64_t num_layers) {
  return stacked.typed_data() + layer * (int64_t(stacked.element_count()) / num_layers);
}

// Entries and rings of all layers as arguments, and as results in the same memory.
struct PoolBuffers {
  F32 &state, &window, &keys, &fresh, &decay, &inputs;
  Pool &state_out, &window_out, &keys_out, &fresh_out, &decay_out, &inputs_out;

  // Sets the heads, widths, and numbers of entries and rows of a layer.
  void read_sizes(native::DeltaShapes& s, int64_t num_layers) const {
    s.num_heads = size_of(state, 1), s.key_width = size_of(state, 2), s.value_width = size_of(state, 3);
    s.num_key_heads = size_of(keys, 2);
    s.num_entries = native::times(num_layers, size_of(state, 0)), s.num_rows = native::times(num_layers, size_of(keys, 0));
  }

  // Returns true if the pools have the sizes of a layer, for all layers.
  bool fit(const native::DeltaShapes& s) const {
    const int64_t rows = size_of(keys, 0);
    return is(window, {size_of(state, 0), s.num_taps - 1, s.num_key_heads, s.channels()}) &&
           is(keys, {rows, native::kChunk, s.num_key_heads, s.key_width}) &&
           is(fresh, {rows, native::kChunk, s.num_heads, s.value_width}) &&
           is(decay, {rows, native::kChunk, s.num_heads, s.num_decays}) &&
           is(inputs, {rows, native::kWindowRows, s.num_key_heads, s.channels()});
  }

  bool are_in_place() const {
    const auto is_in_place = [](F32& pool, Pool& result) { return pool.untyped_data() == result->untyped_data(); };
    return is_in_place(state, state_out) && is_in_place(window, window_out) && is_in_place(keys, keys_out) &&
           is_in_place(fresh, fresh_out) && is_in_place(decay, decay_out) && is_in_place(inputs, inputs_out);
  }

  native::DeltaPools of_layer(int64_t layer, int64_t num_layers) const {
    const auto part = [&](Pool& pool) { return layer_of(*pool, layer, num_layers); };
    return {part(state_out), part(window_out), part(keys_out), part(fresh_out), part(decay_out), part(inputs_out)};
  }
};

// Returns true if a layer can have these heads, widths, taps, entries and rows.
bool are_sizes(const native::DeltaShapes& s) {
  return native::times(s.num_key_heads, s.num_heads) >= 0 && s.key_width > 0 && s.value_width > 0 && s.width % 2 == 0 &&
         s.rank % 2 == 0 && s.v_width() % 2 == 0 && s.num_taps >= 2 && s.num_taps <= native::kWindowRows / 2 &&
         s.num_entries >= 0 && s.num_rows >= 0;
}

}  // namespace
