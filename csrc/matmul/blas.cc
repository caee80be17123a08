#include "matmul/blas.h"

#include <mutex>  // std::mutex

namespace jaxcoll {
namespace {

BlasFunctions& Functions() {
  static BlasFunctions functions;
  return functions;
}

// How many threads the BLAS takes otherwise, while products of ours run.
struct UsualThreads {
  std::mutex mutex;
  int num_products = 0;
  int count = 1;

  static UsualThreads& Get() {
    static auto* const usual = new UsualThreads();  // leaked: products may run at exit
    return *usual;
  }
};

// While products of ours run, the BLAS takes one thread for each: there are as many products at
// once as cores. What is set counts for the process, so it is set back in between.
class OneThreadEach {
 public:
  OneThreadEach() : is_needed_(Functions().set_num_threads != nullptr) {
    if (!is_needed_) {
      return;
    }
    UsualThreads& usual = UsualThreads::Get();
    const std::lock_guard<std::mutex> lock(usual.mutex);
    if (usual.num_products++ == 0) {
      usual.count = Functions().num_threads();
      Functions().set_num_threads(1);
    }
  }
  OneThreadEach(const OneThreadEach&) = delete;
  OneThreadEach& operator=(const OneThreadEach&) = delete;
  ~OneThreadEach() {
    if (!is_needed_) {
      return;
    }
    UsualThreads& usual = UsualThreads::Get();
    const std::lock_guard<std::mutex> lock(usual.mutex);
    if (--usual.num_products == 0) {
      Functions().set_num_threads(usual.count);
    }
  }

 private:
  const bool is_needed_;
};

// BLAS has columns one after the other, we have rows: our c = a b is its c' = b' a'.
template <typename T, typename Gemm>
void MultiplyAs(Gemm gemm, const ProductShape& shape, const Matrix& a, const Matrix& b, void* c,
                std::size_t c_step, bool adds) {
  const char of_a = a.is_transposed ? 'T' : 'N';
  const char of_b = b.is_transposed ? 'T' : 'N';
  const int rows = static_cast<int>(shape.rows);
  const int inner = static_cast<int>(shape.inner);
  const int columns = static_cast<int>(shape.columns);
  const int a_step = static_cast<int>(a.step);
  const int b_step = static_cast<int>(b.step);
  const int to_step = static_cast<int>(c_step);
  const T one = 1;
  const T beta = adds ? T{1} : T{0};
  gemm(&of_b, &of_a, &columns, &rows, &inner, &one, static_cast<const T*>(b.data), &b_step,
       static_cast<const T*>(a.data), &a_step, &beta, static_cast<T*>(c), &to_step);
}

}  // namespace

void SetBlas(const BlasFunctions& functions) { Functions() = functions; }

void Multiply(DType dtype, const ProductShape& shape, const Matrix& a, const Matrix& b, void* c,
              std::size_t c_step, bool adds) {
  const OneThreadEach one_thread_each;
  if (dtype == DType::kF64) {
    MultiplyAs<double>(Functions().dgemm, shape, a, b, c, c_step, adds);
  } else {
    MultiplyAs<float>(Functions().sgemm, shape, a, b, c, c_step, adds);
  }
}

}  // namespace jaxcoll
