"""Table of model families, a line each; a module describes the models of its ARCHITECTURE."""

from rayserve_moe.model.families import afmoe as afmoe
from rayserve_moe.model.families import bailing_moe_v2 as bailing_moe_v2
from rayserve_moe.model.families import deepseek_v2 as deepseek_v2
from rayserve_moe.model.families import deepseek_v3 as deepseek_v3
from rayserve_moe.model.families import deepseek_v32 as deepseek_v32
from rayserve_moe.model.families import dots1 as dots1
from rayserve_moe.model.families import ernie4_5_moe as ernie4_5_moe
from rayserve_moe.model.families import gemma4_text as gemma4_text
from rayserve_moe.model.families import glm4_moe as glm4_moe
from rayserve_moe.model.families import glm4_moe_lite as glm4_moe_lite
from rayserve_moe.model.families import glm_moe_dsa as glm_moe_dsa
from rayserve_moe.model.families import gpt_oss as gpt_oss
from rayserve_moe.model.families import granitemoe as granitemoe
from rayserve_moe.model.families import hunyuan_v1_moe as hunyuan_v1_moe
from rayserve_moe.model.families import hy_v3 as hy_v3
from rayserve_moe.model.families import laguna as laguna
from rayserve_moe.model.families import minimax_m2 as minimax_m2
from rayserve_moe.model.families import minimax_m3_vl_text as minimax_m3_vl_text
from rayserve_moe.model.families import mistral4 as mistral4
from rayserve_moe.model.families import mixtral as mixtral
from rayserve_moe.model.families import olmoe as olmoe
from rayserve_moe.model.families import qwen2_moe as qwen2_moe
from rayserve_moe.model.families import qwen3_5_moe_text as qwen3_5_moe_text
from rayserve_moe.model.families import qwen3_moe as qwen3_moe
from rayserve_moe.model.families import qwen3_next as qwen3_next
from rayserve_moe.model.families import solar_open as solar_open
