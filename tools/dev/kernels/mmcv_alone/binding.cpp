// mmcv's CUDA operator of deformable sampling as operators of torch. It includes nothing of Python, so that the library
// serves every Python beside the torch that it was compiled for.
#include <torch/library.h>

at::Tensor ms_deform_attn_cuda_forward(
    const at::Tensor &, const at::Tensor &, const at::Tensor &, const at::Tensor &, const at::Tensor &, const int);
void ms_deform_attn_cuda_backward(
    const at::Tensor &, const at::Tensor &, const at::Tensor &, const at::Tensor &, const at::Tensor &,
    const at::Tensor &, at::Tensor &, at::Tensor &, at::Tensor &, const int);

namespace {

at::Tensor forward(
    const at::Tensor &value, const at::Tensor &shapes, const at::Tensor &starts, const at::Tensor &locations,
    const at::Tensor &weights, int64_t step) {
    return ms_deform_attn_cuda_forward(value, shapes, starts, locations, weights, (int)step);
}

void backward(
    const at::Tensor &value, const at::Tensor &shapes, const at::Tensor &starts, const at::Tensor &locations,
    const at::Tensor &weights, const at::Tensor &grad, at::Tensor grad_value, at::Tensor grad_locations,
    at::Tensor grad_weights, int64_t step) {
    ms_deform_attn_cuda_backward(
        value, shapes, starts, locations, weights, grad, grad_value, grad_locations, grad_weights, (int)step);
}

}  // namespace

TORCH_LIBRARY(mmcv_alone, library) {
    library.def(
        "forward(Tensor value, Tensor shapes, Tensor starts, Tensor locations, Tensor weights, int step) -> Tensor",
        forward);
    library.def(
        "backward(Tensor value, Tensor shapes, Tensor starts, Tensor locations, Tensor weights, Tensor grad, "
        "Tensor(a!) grad_value, Tensor(b!) grad_locations, Tensor(c!) grad_weights, int step) -> ()",
        backward);
}
