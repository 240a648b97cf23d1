"""What kernel names say: spellings of nsys, Kineto and rocprof, mangled names, and the traps among them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from infprof.diagnosis import analyze_file
from infprof.errors import InfprofError
from infprof.measures.kernel_class import base_name, classify, inner_name, is_communication, short_name
from infprof.readers import read

KINDS = [
    ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_splitK_TNT", "gemm"),
    ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_64x6_tn_align8>(P)", "gemm"),
    ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT128x192x64_MI16x16x1_SN_LDSB1", "gemm"),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>(int)", "gemm"),
    ("void marlin::Marlin<1125899906910725l, 1125899906843648l, 256, 1, 8>(int4 const*)", "gemm"),
    ("void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 2, 2, false>(int)", "gemv"),
    ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, __nv_bfloat16>(P)", "gemv"),
    ("void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, cutlass::half_t>>(P)", "attention"),
    ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<int>>>(P)", "attention"),
    ("fmhaSm100fKernel_QkvBfloat16OBfloat16H128PagedKvCausalP64VarSeqQ128Kv128PersistentContext", "attention"),
    ("void vllm::reshape_and_cache_flash_kernel<__hip_bfloat16, (vllm::Fp8KVCacheDataType)0>(P)", "kv-cache"),
    ("fused_moe_kernel", "moe"),
    ("bmm_E2m1_E2m1E2m1_Fp32_t128x16x512_s5_et128x16_swiGlu_dynB_sm100f", "moe"),
    ("_ZN5aiter24add_rmsnorm_quant_kernelIDF16bDF16bLi256ELi16ELb1EEEvPT0_", "norm"),
    ("void vllm::rms_norm_kernel<c10::BFloat16, 8, 2>(c10::BFloat16*)", "norm"),
    ("void vllm::scaled_fp8_quant_kernel_strided<c10::BFloat16, c10::Float8_e4m3fn>(P)", "quantise"),
    ("void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*)", "rotary"),
    ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float, float>(float*)", "softmax"),
    ("void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>(P)", "sampling"),
    ("void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*)", "embedding"),
    ("sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x16", "conv"),
    ("void vllm::act_and_mul_kernel<c10::BFloat16, &vllm::silu_kernel<c10::BFloat16>>(P)", "activation"),
    ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>(R)", "reduce"),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, A>(int)", "fill"),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, A>(int)", "elementwise"),
    ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(T)::{lambda()#2}>(I)", "copy"),
    ("__amd_rocclr_copyBuffer.kd", "copy"),
    ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long)", "communication"),
    # Compiled kernels list operations that did not run inside them.
    ("triton_poi_fused_add_addmm_all_reduce_silu_21", "elementwise"),
    ("triton_red_fused_add_marlin_gemm_mean_mul_4", "reduce"),
    # Anybody's names: a guess would be worse.
    ("_fwd_kernel", "other"),
    ("Kernel", "other"),
    ("void cutlass::device_kernel<", "other"),
]


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_kind(name: str, kind: str) -> None:
    assert classify([name])[0].kind == kind


MATRIX_PRECISION = [
    ("ampere_sgemm_128x64_tn", "fp32", False),
    ("void cutlass::Kernel2<cutlass_80_simt_sgemm_64x64_8x5_tn_align1>(P)", "fp32", False),
    ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma_aligna4", "fp32", False),
    ("cutlass3x_sm100_simt_sgemm_f32_f32_f32_f32_f32_128x128x16_1x1x1_3_tnn_align1", "fp32", False),
    ("sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x64x64_stage3_tensor16x8x8", "tf32", True),
    ("sm80_xmma_gemm_tf32f32_tf32f32_f32_nn_n_tilesize128x64x64_tensor16x8x8", "tf32", True),
    ("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_128x128_16x4_nt_align4>(P)", "tf32", True),
    ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_tf32_128x128_16x4_nt_align4>(P)", "tf32", True),
    ("sm90_xmma_gemm_f32f32_f32_nn_n_tilesize128x128x32_warpgroupsize1x1x1_execute_segment_k_on", "fp32", None),
    ("ampere_bf16_s1688gemm_bf16_128x64_sliced1x2_ldg8_f2f_tn", "bf16", True),
    ("ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_64x4_tn", "fp16", True),
    ("turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_tn", "fp16", True),
    ("volta_fp16_s884gemm_fp16_128x64_ldg8_f2f_tn", "fp16", True),
    ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNN", "fp16", True),
    ("nvjet_tss_256x128_64x4_1x2_h_bz_coopA_TNT", "bf16", True),
    ("nvjet_sm90_qqtst_128x128_128x6_2x1_v_bz_TNT", "fp8", True),
    ("void cutlass::device_kernel<vllm::cutlass_3x_gemm_sm90_fp8<cutlass::float_e4m3_t>>(P)", "fp8", True),
    ("_batched_gemm_a16wfp4_kernel_BLOCK_SIZE_M_16", "bf16", True),
    ("void marlin::Marlin<1125899906909960l, 1125899906843648l, 256, 1, 8>(int4 const*)", "bf16", True),
    ("Cijk_Alik_Bljk_SB_Bias_AS_SAV_UserArgs_MT64x16x32_MI16x16x1_SN", "fp32", None),
    ("fused_gemm_kernel", None, None),
]


@pytest.mark.parametrize(("name", "precision", "tensor_cores"), MATRIX_PRECISION)
def test_precision_of_matrix_products(name: str, precision: str | None, tensor_cores: bool | None) -> None:
    found = classify([name])[0]
    assert (found.kind, found.precision, found.tensor_cores) == ("gemm", precision, tensor_cores)
    assert found.fp32_gemm is (precision == "fp32" and tensor_cores is False)


@pytest.mark.parametrize(
    ("name", "precision", "fp32_gemm"),
    [
        ("void gemv2N_kernel<int, int, float, float, float, float, 128, 8, 4, 4, 1, false>(int)", "fp32", True),
        ("void gemv2T_kernel_val<int, int, __half, __half, __half, float, 128, 16, 2, 2, false>(int)", "fp16", False),
        # Weights of four bits, summed in FP32.
        ("void gemv_kernel_cuda<float>(unsigned int*, float)", "fp32", False),
    ],
)
def test_a_product_with_a_vector_is_one_in_fp32_where_the_weights_surely_are(
    name: str, precision: str, fp32_gemm: bool
) -> None:
    gemv = classify([name])[0]
    assert (gemv.kind, gemv.precision, gemv.fp32_gemm) == ("gemv", precision, fp32_gemm)


def test_other_kernels_show_their_type_as_a_template_argument() -> None:
    names = ["void vllm::rms_norm_kernel<c10::BFloat16, 8, 2>(float*)", "_ZN5aiter13rmsnorm_quantIDF16_Li64EEEvPT_"]
    assert [c.precision for c in classify(names)] == ["bf16", "fp16"]


def test_the_automatic_cache_type_is_not_fp8() -> None:
    name = "void vllm::paged_attention_v2_kernel<__nv_bfloat16, __nv_bfloat16, 128, (vllm::Fp8KVCacheDataType)0>(P)"
    assert classify([name])[0].precision == "bf16"


@pytest.mark.parametrize(
    "name",
    [
        "ncclKernel_AllReduce_RING_LL_Sum_half(ncclWorkElem)",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)",
        "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)",
        "ncclSymDevKernel_AllReduce_RSxLD_AGxST",
        "ncclAllReduceRingLLKernel_sum_f32(ncclColl)",
        "nccl:all_reduce",
        "rccl_AllGather",
        "mscclKernel_Sum_float_LL_false(ncclDevComm*, mscclAlgo*, mscclWork*)",
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(vllm::RankData*)",
        "_ZN4vllm23cross_device_reduce_1stageI13__nv_bfloat16Li2EEEvPNS_8RankDataE",
        "multimem_all_reduce_kernel",
        "one_shot_all_reduce_kernel",
        "oneShotAllReduceKernel",
        "reduce_scatter_cuda_kernel",
        "nvshmemi_transfer_amo",
        "void deep_ep::internode_ll::dispatch<true, 3, 10, 7168>(void*, float*, int*)",
        "void deep_ep::intranode::combine<__nv_bfloat16, 8, 768>(P)",
        "_dcp_a2a_pack_send_kernel.kd",
    ],
)
def test_communication_kernels(name: str) -> None:
    assert is_communication(name)
    assert classify([name])[0].kind == "communication"


@pytest.mark.parametrize(
    "name",
    [
        "myncclike_gemm",
        "ncclike_gemm",
        "small_gather_kernel",
        "void at::native::vectorized_gather_kernel<16, long>(char*)",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(R)",
        "scatter_reduce",
        "triton_poi_fused_add_all_reduce_mul_3",
        "void deep_ep::layout::get_dispatch_layout<256, 32, 8>(long const*, int*)",
    ],
)
def test_names_that_only_look_like_communication(name: str) -> None:
    assert not is_communication(name)
    assert classify([name])[0].kind != "communication"


NSYS = (
    "void at::native::vectorized_elementwise_kernel<(int)4, at::native::FillFunctor<int>, "
    "std::array<char *, (unsigned long)1>>(int, T2, T3)"
)
KINETO = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>, std::array<char*, 1ul> >"
    "(int, at::native::FillFunctor<int>, std::array<char*, 1ul>)"
)


def test_both_tools_spellings_are_one_kernel() -> None:
    assert classify([NSYS]) == classify([KINETO])
    assert short_name(NSYS) == short_name(KINETO) == "vectorized_elementwise_kernel<FillFunctor>"
    assert base_name(NSYS) == base_name(KINETO) == "vectorized_elementwise_kernel"


@pytest.mark.parametrize(
    ("name", "base", "short"),
    [
        ("ampere_sgemm_128x64_tn", "ampere_sgemm_128x64_tn", "ampere_sgemm_128x64_tn"),
        ("void <unnamed>::store<(long)128, (bool)1>(<unnamed>::P)", "store", "store"),
        ("at::cuda::(anonymous namespace)::spin_kernel(long)", "spin_kernel", "spin_kernel"),
        (
            "void cutlass::Kernel2<cutlass_80_simt_sgemm_64x64_8x5_tn_align1>(X::Params)",
            "Kernel2",
            "cutlass_80_simt_sgemm_64x64_8x5_tn_align1",
        ),
        (
            "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<int, flash::M<2>>>>(P)",
            "device_kernel",
            "FlashAttnFwdSm90",
        ),
        (
            "_ZN7cutlass7Kernel2I66cutlass_80_tensorop_f16_s16816gemm_relu_f16_256x128_32x3_tn_align8EEvNT_6ParamsE",
            "Kernel2",
            "cutlass_80_tensorop_f16_s16816gemm_relu_f16_256x128_32x3_tn…",
        ),
        ("_ZN4vllm15rms_norm_kernelIN3c108BFloat16ELi8EEEvPT_", "rms_norm_kernel", "rms_norm_kernel"),
        ("_Z13simple_kernelPfi", "simple_kernel", "simple_kernel"),
        (
            "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, float, false, 7>(P<float>)",
            "kernel",
            "gemvx::kernel",
        ),
        ("chunk_kda_fwd_kernel_intra_sub_chunk.kd", "chunk_kda_fwd_kernel_intra_sub_chunk", None),
        ("void f<8, true>(int*, unsigned long) [clone .kd]", "f", "f"),
    ],
)
def test_names_for_display_and_for_ncu(name: str, base: str, short: str | None) -> None:
    assert base_name(name) == base
    assert short_name(name) == (short or base)


def test_short_names_keep_the_tile_and_fit_a_column() -> None:
    name = "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x256x8_stage3_warpsize1x4x1_ffma_aligna4_alignc4_execute"
    assert len(short_name(name)) == 60 and "tilesize64x256x8" in short_name(name)
    assert short_name(name, width=20) == "sm80_xmma_gemm_f32f…"


def test_only_wrappers_have_an_inside() -> None:
    assert inner_name("void at::native::reduce_kernel<512, 1, R<float>>(R)") is None
    assert inner_name("void cutlass::Kernel<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(P)") == (
        "cutlass_80_simt_sgemm_128x32_8x5_nn_align1"
    )
    assert inner_name("void kernel<float, 3>(float*)") is None


@pytest.mark.parametrize("name", ["", "<", ">>(", "(anonymous namespace)", "_Z", "_ZN", "_Z99short", "a<b", "x" * 5000])
def test_odd_names_do_no_harm(name: str) -> None:
    assert classify([name])[0].kind == "other"
    assert len(short_name(name)) <= 60
    assert isinstance(base_name(name), str)


LIBRARIES = [
    ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long)", "nccl"),
    ("void deep_ep::internode_ll::dispatch<true, 3, 10, 7168>(void*, float*, int*)", "deep-ep"),
    ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_splitK_TNT", "cublas"),
    ("void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 2, 2, false>(int)", "cublas"),
    ("ampere_sgemm_128x64_tn", "cublas"),
    ("void cutlass::Kernel2<cutlass_80_simt_sgemm_64x64_8x5_tn_align1>(P)", "cutlass"),
    # A wrapper of CUTLASS around somebody's own kernel: whose it is stands inside.
    ("void cutlass::device_kernel<vllm::cutlass_3x_gemm_sm90_fp8<cutlass::float_e4m3_t>>(P)", "vllm"),
    ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<int>>>(P)", "flash-attn"),
    ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, cutlass::half_t>>(P)", "flash-attn"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0", "cudnn"),
    ("sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x16", "cudnn"),
    ("fmhaSm100fKernel_QkvBfloat16OBfloat16H128PagedKvCausalP64VarSeqQ128Kv128PersistentContext", "tensorrt-llm"),
    ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<(flashinfer::PosEncodingMode)0>(P)", "flashinfer"),
    ("create_flashinfer_kv_indices_triton", "sglang"),
    ("void sglang::cross_device_reduce_1stage<__nv_bfloat16, 4>(sglang::RankData*)", "sglang"),
    ("void vllm::rms_norm_kernel<c10::BFloat16, 8, 2>(c10::BFloat16*)", "vllm"),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, A>(int)", "aten"),
    ("void at_cuda_detail::cub::DeviceScanKernel<at_cuda_detail::cub::AgentScanPolicy<128>>(P)", "cub"),
    ("triton_poi_fused_add_addmm_all_reduce_silu_21", "triton"),
    ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT128x192x64_MI16x16x1_SN_LDSB1", "hipblaslt"),
    ("_ZN5aiter24add_rmsnorm_quant_kernelIDF16bDF16bLi256ELi16ELb1EEEvPT0_", "aiter"),
    ("__amd_rocclr_copyBuffer.kd", "rocm"),
    (
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>)",
        "xformers",
    ),
    # Anybody's names.
    ("_fwd_kernel", None),
    ("Kernel", None),
    ("my_own_kernel(float*)", None),
]


@pytest.mark.parametrize(("name", "library"), LIBRARIES)
def test_library(name: str, library: str | None) -> None:
    assert classify([name])[0].library == library


def test_almost_all_kernel_time_of_public_traces_has_a_class_and_a_library(shared_traces: Path) -> None:
    total = without_kind = without_library = 0.0
    for path in sorted(shared_traces.glob("*/*")):
        try:
            kernels, strings = (trace := read(path)).kernels, trace.strings
        except InfprofError:
            continue
        if kernels is None or not len(kernels):
            continue
        spent = np.bincount(kernels["name"], np.maximum(kernels["end"] - kernels["start"], 0), len(strings))
        classes = classify(strings)
        total += spent.sum()
        without_kind += spent[[c.kind == "other" for c in classes]].sum()
        without_library += spent[[c.library is None for c in classes]].sum()
    assert total > 0
    assert without_kind / total < 0.001
    assert without_library / total < 0.002


def test_kernels_that_no_name_explains_are_a_problem_when_they_take_much_time(shared_traces: Path) -> None:
    unnamed = analyze_file(shared_traces / "nsys-sqlite" / "rtx6000_old_schema_gpudb.sqlite.gz")
    (problem,) = [p for p in unnamed.problems if p.code == "unknown-kernels"]
    assert "100 % of the kernel time" in problem.message and "probe_GPU2" in problem.message and problem.count == 2
    named = analyze_file(shared_traces / "kineto" / "h100_qwen1.5-0.5b.json.gz")
    assert "unknown-kernels" not in {p.code for p in named.problems}
