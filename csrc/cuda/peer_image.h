// cuda/peer_image.h: the kernels of cuda/peer_kernels.cu, as far as there was an nvcc.
#pragma once

namespace jaxcoll::cuda {

/// An image for CUDA's driver, or null.
const void* PeerImage();

}  // namespace jaxcoll::cuda
