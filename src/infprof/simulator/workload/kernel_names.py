"""Names of the kernels that libraries pick, by architecture, type and shape, spelt as nsys spells them."""

from __future__ import annotations

from dataclasses import dataclass

_TORCH = {"bfloat16": "c10::BFloat16", "float16": "c10::Half", "float32": "float"}
_CUDA = {"bfloat16": "__nv_bfloat16", "float16": "__half", "float32": "float"}
_CUTLASS = {"bfloat16": "cutlass::bfloat16_t", "float16": "cutlass::half_t", "float32": "float"}
_NVJET = {"bfloat16": "tst", "float16": "hsh"}
_CUBLAS = {"bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class KernelNames:
    """``arch`` as in the table of device peaks, ``dtype`` as PyTorch calls it."""

    arch: str
    dtype: str

    def gemm(self, rows: int) -> str:
        """A matrix product of so many rows: cuBLAS's choice of tile follows from them."""
        if rows == 1:
            return self._gemv()
        if self.dtype == "float32":
            return "ampere_sgemm_32x128_tn" if rows <= 32 else "ampere_sgemm_128x128_tn"
        if self.arch in ("hopper", "blackwell"):
            tile = (
                "64x8_64x16_4x1_v_bz_TNT"
                if rows <= 16
                else "64x64_64x13_1x2_h_bz_TNT"
                if rows <= 128
                else "128x256_64x4_2x1_v_bz_coopA_TNT"
            )
            prefix = "sm100_" if self.arch == "blackwell" else ""
            return f"nvjet_{prefix}{_NVJET[self.dtype]}_{tile}"
        name = _CUBLAS[self.dtype]
        if self.arch in ("volta", "turing"):
            return f"{self.arch}_{name}_{'s884' if self.arch == 'volta' else 's1688'}gemm_{name}_128x128_ldg8_f2f_tn"
        tile = "64x64_sliced1x2_ldg8_f2f_stages_64x6_tn" if rows <= 64 else "128x128_ldg8_f2f_stages_32x5_tn"
        return f"ampere_{name}_s16816gemm_{name}_{tile}"

    def _gemv(self) -> str:
        cuda = _CUDA[self.dtype]
        batches = f"cublasGemvTensorStridedBatched<const {cuda}>"
        parameters = f"{batches}, {batches}, cublasGemvTensorStridedBatched<{cuda}>, float"
        return (
            f"void gemv2T_kernel_val<int, int, {cuda}, {cuda}, {cuda}, float, (int)128, (int)16, (int)4, (int)4, (bool)0, "
            f"(bool)0, cublasGemvParamsEx<int, {parameters}>>(T13, T6, T6)"
        )

    def attention(self, head_size: int, is_decode: bool) -> str:
        """FlashAttention 2, its split-KV variant for decode; in float32 the memory-efficient kernel of PyTorch."""
        if self.dtype == "float32":
            shape = "(bool)1, (int)64, (int)64, (int)64, (bool)1, (bool)1"
            inner = f"PyTorchMemEffAttention::AttentionKernel<float, cutlass::arch::Sm80, {shape}>::Params"
            return f"fmha_cutlassF_f32_aligned_64x64_rf_sm80({inner})"
        tiles = f"(int){head_size}, (int){64 if is_decode else 128}, (int){128 if is_decode else 64}, (int)4"
        kind = _CUTLASS[self.dtype]
        traits = f"Flash_fwd_kernel_traits<{tiles}, (bool)0, (bool)0, {kind}, Flash_kernel_traits<{tiles}, {kind}>>"
        name = "flash_fwd_splitkv_kernel" if is_decode else "flash_fwd_kernel"
        flags = "(bool)0, (bool)0, (bool)0, (bool)0, (bool)1, (bool)0, (bool)1, (bool)0"
        return f"void flash::{name}<{traits}, {flags}>(flash::Flash_fwd_params)"

    @property
    def norm(self) -> str:
        parameters = "T1 *, long, T1 *, const T1 *, float, int, int"
        return f"void vllm::fused_add_rms_norm_kernel<{_TORCH[self.dtype]}, (int)8>({parameters})"

    @property
    def rotary(self) -> str:
        parameters = "const long *, T1 *, T1 *, const T1 *, int, long, long, long, int, int, int"
        return f"void vllm::rotary_embedding_kernel<{_TORCH[self.dtype]}, (bool)1>({parameters})"

    @property
    def cache(self) -> str:
        types = f"{_CUDA[self.dtype]}, {_CUDA[self.dtype]}, (vllm::Fp8KVCacheDataType)0"
        parameters = "const T1 *, const T1 *, T2 *, T2 *, const long *, long, long, long, long, long, int, int, int"
        return f"void vllm::reshape_and_cache_flash_kernel<{types}>({parameters}, const float *, const float *)"

    @property
    def activation(self) -> str:
        torch = _TORCH[self.dtype]
        return f"void vllm::act_and_mul_kernel<{torch}, &vllm::silu_kernel<{torch}>, (bool)1>(T1 *, const T1 *, int)"

    @property
    def embedding(self) -> str:
        parameters = "char *, char *, T2 *, int, long, long, long, long, bool"
        return f"void at::native::<unnamed>::vectorized_gather_kernel<(int)16, long>({parameters})"

    @property
    def argmax(self) -> str:
        operation = "at::native::ReduceOp<float, at::native::ArgMaxOps<float>, unsigned int, long, (int)4, (int)4>"
        return f"void at::native::reduce_kernel<(int)512, (int)1, {operation}>(T3)"

    @property
    def is_finite(self) -> str:
        function = f"at::native::AbsFunctor<{_TORCH[self.dtype]}>"
        return (
            f"void at::native::vectorized_elementwise_kernel<(int)4, {function}, "
            "std::array<char *, (unsigned long)2>>(int, T2, T3)"
        )

    @property
    def all_true(self) -> str:
        function = "at::native::func_wrapper_t<bool, at::native::and_kernel_cuda(at::TensorIterator &)>"
        operation = f"at::native::ReduceOp<bool, {function}, unsigned int, bool, (int)4, (int)4>"
        return f"void at::native::reduce_kernel<(int)512, (int)1, {operation}>(T3)"

    @property
    def concatenate(self) -> str:
        size = 4 if self.dtype == "float32" else 2
        types = f"at::native::<unnamed>::OpaqueType<(unsigned int){size}>, unsigned int, (int)2, (int)64, (int)64"
        parameters = "T1 *, at::native::<unnamed>::CatArrInputTensorMetadata<T1, T2, T4, T5>, T2, int, T2"
        return f"void at::native::<unnamed>::CatArrayBatchedCopy<{types}>({parameters})"
