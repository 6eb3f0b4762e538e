// Appended to every kernel's source: its entry under a fixed name, with parameters by address.
#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>

namespace deep_kernels::emulator {

template <class... Params, std::size_t... kIndices>
void call(void (*kernel)(Params...), void* const* params, std::index_sequence<kIndices...>) {
  kernel(*static_cast<std::remove_cvref_t<Params>*>(params[kIndices])...);
}

template <class... Params>
constexpr std::size_t count(void (*)(Params...)) {
  return sizeof...(Params);
}
template <class... Params>
constexpr std::size_t size_of(void (*)(Params...), std::size_t index) {
  constexpr std::size_t sizes[] = {sizeof(std::remove_cvref_t<Params>)..., 0};
  return sizes[index];
}

}  // namespace deep_kernels::emulator

#define DK_EMULATOR_ENTRY(kernel)                                                      \
  extern "C" void dk_emulator_entry(void* const* params) {                             \
    constexpr auto kCount = deep_kernels::emulator::count(&kernel);                    \
    deep_kernels::emulator::call(&kernel, params, std::make_index_sequence<kCount>()); \
  }                                                                                    \
  extern "C" int dk_emulator_param_bytes(int index) {                                  \
    return static_cast<int>(                                                           \
        deep_kernels::emulator::size_of(&kernel, static_cast<std::size_t>(index)));    \
  }
