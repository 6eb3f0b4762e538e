// Encodes the contract's plain tensor-map descriptions for the card.
#pragma once

#include "deep_kernels/contract/types.h"

namespace deep_kernels {

struct alignas(64) EncodedMap {
  u8 bytes[128];
};
EncodedMap encode(const MapDescription& description);

}  // namespace deep_kernels
