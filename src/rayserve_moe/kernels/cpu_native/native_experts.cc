// The calls of experts that XLA makes: buffers and attributes checked, then handed to the kernel.
#include <string_view>

#include "buffers.h"
#include "experts.h"

namespace {

// Row `row` of a matrix; null where the array is empty.
template <class Number, class Buffer>
const Number* from_row(Buffer& rows, int64_t row, int64_t width) {
  return rows.element_count() == 0 ? nullptr : static_cast<const Number*>(rows.untyped_data()) + row * width;
}

// How many scales a column of `depth` rows has, of matrices [slots, depth, columns]: 1 or more than its blocks; 0: they fit not.
int64_t blocks_of(F32& scales, int64_t slots, int64_t depth, int64_t columns) {
  if (!have_dims(3, scales) || size_of(scales, 0) != slots || size_of(scales, 2) != columns) return 0;
  const int64_t blocks = size_of(scales, 1), all = (depth + native::kScaleBlock - 1) / native::kScaleBlock;
  return blocks == 1 || blocks >= all ? blocks : 0;
}

// Experts whose matrices are of bfloat16, or of 8 bits with scales.
template <class Weight, class Matrices>
ffi::Error Experts(Bf16 hidden, S32 slots, F32 gates, Matrices gate, Matrices up, Matrices down, Bf16 gate_bias,
                   Bf16 up_bias, Bf16 down_bias, F32 gate_scale, F32 up_scale, F32 down_scale, S32 first_slot,
                   int64_t num_slots, std::string_view activation, float slope, float limit, ffi::RemainingArgs adapters,
                   ffi::ResultBuffer<ffi::F32> out) {
  if (!have_dims(2, hidden, slots) || !have_dims(3, up) || !have_dims(0, first_slot))
    return wrong("experts take arrays of other numbers of dimensions");
  if constexpr (std::is_same_v<Weight, native::Fp8>)
    for (auto* matrices : {&gate, &up, &down})
      if (matrices->element_type() != ffi::F8E4M3FN) return wrong("these experts take matrices of e4m3");
  const native::ExpertShapes shapes{size_of(hidden, 0), size_of(slots, 1), size_of(hidden, 1), size_of(up, 2),
                                    num_slots, {native::activation_of(activation), slope, limit}};
  const int64_t first = first_slot.typed_data()[0], all = size_of(up, 0), size = shapes.width * shapes.inner;
  const int64_t inner = shapes.inner, width = shapes.width;
  const int64_t up_blocks = blocks_of(up_scale, all, width, inner), down_blocks = blocks_of(down_scale, all, inner, width);
  const bool has_gate = shapes.activation.kind != native::Activation::kRelu2;
  const int64_t gate_blocks = has_gate ? blocks_of(gate_scale, all, width, inner) : up_blocks;
  const bool have_scales = up_blocks && down_blocks && gate_blocks == up_blocks;
  const bool have_none = gate_scale.element_count() + up_scale.element_count() + down_scale.element_count() == 0;
  if (!is(slots, {shapes.num_tokens, shapes.top_k}) || !is(gates, {shapes.num_tokens, shapes.top_k}) ||
      !(has_gate ? is(gate, {all, width, inner}) : gate.element_count() == 0) || !is(up, {all, shapes.width, shapes.inner}) ||
      !is(down, {all, shapes.inner, shapes.width}) || !is(*out, {shapes.num_tokens, shapes.width}) ||
      !is_absent_or(gate_bias, {all, inner}) || !is_absent_or(up_bias, {all, inner}) ||
      !is_absent_or(down_bias, {all, width}))
    return wrong("tokens, picks and weights of experts do not fit each other");
  if (!(sizeof(Weight) == 1 ? have_scales : have_none)) return wrong("columns of 8 bits have scales, and no others");
  if (num_slots < 0 || first < 0 || num_slots > all - first) return wrong("there are no such expert slots");
  if (shapes.num_tokens * shapes.top_k > INT32_MAX) return wrong("there are too many picks");
  if (shapes.width % 2 || shapes.inner % native::kPanel) return wrong("experts take even rows, and inner ones of whole panels");
  if (shapes.activation.kind == native::Activation::kUnknown) return wrong("experts have no such activation");
  native::ExpertArrays<Weight> arrays{numbers(hidden), slots.typed_data(), gates.typed_data()};
  arrays.gate = from_row<Weight>(gate, first, size), arrays.up = from_row<Weight>(up, first, size);
  arrays.down = from_row<Weight>(down, first, size);
  arrays.gate_bias = from_row<native::bf16>(gate_bias, first, inner);
  arrays.up_bias = from_row<native::bf16>(up_bias, first, inner);
  arrays.down_bias = from_row<native::bf16>(down_bias, first, width);
  arrays.gate_scale = from_row<float>(gate_scale, first, up_blocks * inner);
  arrays.up_scale = from_row<float>(up_scale, first, up_blocks * inner);
  arrays.down_scale = from_row<float>(down_scale, first, down_blocks * width);
  arrays.out = out->typed_data(), arrays.up_blocks = up_blocks, arrays.down_blocks = down_blocks;
  AdapterArguments given(adapters, first, shapes.num_tokens, num_slots);
  given.read(arrays.gate_adapters, width, inner), given.read(arrays.up_adapters, width, inner);
  given.read(arrays.down_adapters, inner, width);
  if (given.are_wrong()) return wrong("adapters do not fit tokens and weights of experts");
  native::expert_sums(shapes, arrays);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoeExperts, (Experts<native::bf16, Bf16>),
                              ffi::Ffi::Bind().Arg<Bf16>().Arg<S32>().Arg<F32>().Arg<Bf16>().Arg<Bf16>().Arg<Bf16>()
                                  .Arg<Bf16>().Arg<Bf16>().Arg<Bf16>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<S32>()
                                  .Attr<int64_t>("num_slots").Attr<std::string_view>("activation")
                                  .Attr<float>("slope").Attr<float>("limit").RemainingArgs().Ret<F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoeInt8Experts, (Experts<int8_t, S8>),
                              ffi::Ffi::Bind().Arg<Bf16>().Arg<S32>().Arg<F32>().Arg<S8>().Arg<S8>().Arg<S8>()
                                  .Arg<Bf16>().Arg<Bf16>().Arg<Bf16>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<S32>()
                                  .Attr<int64_t>("num_slots").Attr<std::string_view>("activation")
                                  .Attr<float>("slope").Attr<float>("limit").RemainingArgs().Ret<F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoeFp8Experts, (Experts<native::Fp8, F8>),
                              ffi::Ffi::Bind().Arg<Bf16>().Arg<S32>().Arg<F32>().Arg<F8>().Arg<F8>().Arg<F8>()
                                  .Arg<Bf16>().Arg<Bf16>().Arg<Bf16>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<S32>()
                                  .Attr<int64_t>("num_slots").Attr<std::string_view>("activation")
                                  .Attr<float>("slope").Attr<float>("limit").RemainingArgs().Ret<F32>());
