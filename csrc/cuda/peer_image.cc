#include "cuda/peer_image.h"

#ifdef JAXCOLL_PEER_IMAGE
// The file as it is: to write it as numbers takes the compiler seconds.
asm(".pushsection .rodata\n"
    ".balign 16\n"
    "jaxcoll_peer_image:\n"
    ".incbin \"" JAXCOLL_PEER_IMAGE
    "\"\n"
    ".popsection\n");
extern "C" __attribute__((visibility("hidden"))) const unsigned char jaxcoll_peer_image[];
#endif

namespace jaxcoll::cuda {

const void* PeerImage() {
#ifdef JAXCOLL_PEER_IMAGE
  return jaxcoll_peer_image;
#else
  return nullptr;
#endif
}

}  // namespace jaxcoll::cuda
