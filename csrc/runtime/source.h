// A Spec in words: the source text, the key, JSON and messages all come from Spec::fields.
#pragma once

#include <fmt/format.h>

#include <string>
#include <type_traits>

#include "deep_kernels/contract/types.h"

namespace deep_kernels {

// What a kernel's text is made of beside its Spec.
struct KernelText {
  const char* header;      // the kernel header to include
  const char* spec_type;   // "MqaLogitsSpec"
  const char* function;    // device function template over the Spec
  const char* params;      // parameters of the entry
  const char* arguments;   // what the function gets
  const char* args_type;   // "MqaLogitsArgs"
  std::size_t args_bytes;  // its size on the host
};

namespace source_detail {

// "Clean" of "deep_kernels::Clean": enumerators are written with their type in the source.
template <class Enum>
constexpr std::string_view enum_type() {
  std::string_view text = __PRETTY_FUNCTION__;  // "... [with Enum = deep_kernels::Clean; ...]"
  text.remove_prefix(text.find("Enum = ") + 7);
  text = text.substr(0, text.find_first_of(";]"));
  return text.substr(text.rfind(':') + 1);
}

template <class Value>
std::string word(Value value) {
  if constexpr (std::is_enum_v<Value>)
    return name_of(value);
  else
    return fmt::format("{}", static_cast<long long>(value));
}

}  // namespace source_detail

// "backend=sm90 format=fp8 head_dim=128 ..."
template <class Spec>
std::string describe_spec(const Spec& spec) {
  std::string text;
  spec.fields([&](const char* name, auto value) {
    text += fmt::format("{}{}={}", text.empty() ? "" : " ", name, source_detail::word(value));
  });
  return text;
}

template <class Spec>
std::string spec_json(const Spec& spec) {
  std::string text;
  spec.fields([&](const char* name, auto value) {
    constexpr bool kQuoted = std::is_enum_v<decltype(value)>;
    text += fmt::format("{}\"{}\": {}{}{}", text.empty() ? "" : ", ", name, kQuoted ? "\"" : "",
                        source_detail::word(value), kQuoted ? "\"" : "");
  });
  return fmt::format("{{{}}}", text);
}

template <class Spec>
std::string generate_source(const Spec& spec, const KernelText& text, const std::string& entry) {
  std::string fields;
  spec.fields([&](const char* name, auto value) {
    using Value = decltype(value);
    const std::string word = source_detail::word(value);
    if constexpr (std::is_enum_v<Value>)
      fields +=
          fmt::format("    .{} = dk::{}::{},\n", name, source_detail::enum_type<Value>(), word);
    else
      fields += fmt::format("    .{} = {},\n", name, word);
  });
  return fmt::format(
      "#include \"{header}\"\n"
      "namespace dk = deep_kernels;\n"
      "inline constexpr dk::{spec_type} kSpec{{\n{fields}}};\n"
      "static_assert(sizeof(dk::{args_type}) == {args_bytes}, \"rebuild the extension: the headers "
      "\"\n"
      "              \"are not those it was built from\");\n"
      "DK_KERNEL(kSpec.num_threads())\n"
      "{entry}({params}) {{\n"
      "  dk::{function}<kSpec>({arguments});\n"
      "}}\n",
      fmt::arg("header", text.header), fmt::arg("spec_type", text.spec_type),
      fmt::arg("fields", fields), fmt::arg("entry", entry), fmt::arg("params", text.params),
      fmt::arg("function", text.function), fmt::arg("arguments", text.arguments),
      fmt::arg("args_type", text.args_type), fmt::arg("args_bytes", text.args_bytes));
}

}  // namespace deep_kernels
