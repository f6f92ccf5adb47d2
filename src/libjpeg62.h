/* libjpeg-turbo's structures as its callers see them (ABI 62), so that the library can be bound at run time, without its headers.
 *
 * jpeg_CreateDecompress compares the version and the size of jpeg62_decompress with its own and refuses others: a library of ABI 7
 * or 8 is found out before it touches a field. Names are the library's, and all fields are there: one left out would move all
 * behind it.
 *
 * Source: libjpeg-turbo, jpeglib.h and libjpeg.txt (https://libjpeg-turbo.org).
 */
#ifndef SHMLOAD_LIBJPEG62_H
#define SHMLOAD_LIBJPEG62_H

#include <stddef.h>
#include <stdint.h>

enum { JPEG62_VERSION = 62, JPEG62_RGB = 2, JPEG62_ISLOW = 0, JPEG62_IFAST = 1, JPEG62_HEADER_OK = 1, JPEG62_MESSAGE = 200 };

typedef struct jpeg62_decompress jpeg62_decompress;

typedef struct {
    void (*error_exit)(jpeg62_decompress *cinfo);                     /* may not return */
    void (*emit_message)(jpeg62_decompress *cinfo, int level);        /* level -1: a warning; 0 and more: a trace */
    void (*output_message)(jpeg62_decompress *cinfo);                 /* prints */
    void (*format_message)(jpeg62_decompress *cinfo, char *buffer);   /* into JPEG62_MESSAGE bytes */
    void (*reset_error_mgr)(jpeg62_decompress *cinfo);                /* at the start of an image */
    int msg_code;                                                     /* which message */
    union {
        int i[8];
        char s[80];
    } msg_parm;                                                       /* what it says */
    int trace_level;                                                  /* traces above are left out */
    long num_warnings;                                                /* so far */
    const char *const *jpeg_message_table;                            /* texts, and a second table of a caller's own */
    int last_jpeg_message;
    const char *const *addon_message_table;
    int first_addon_message, last_addon_message;
} jpeg62_error;

typedef struct {
    void (*progress_monitor)(jpeg62_decompress *cinfo); /* now and then: at least once a row of MCUs of each scan */
    long pass_counter, pass_limit;                      /* work done and to do in this pass */
    int completed_passes, total_passes;                 /* passes */
} jpeg62_progress;

struct jpeg62_decompress {
    jpeg62_error *err;         /* set by the caller before anything else */
    void *mem;                 /* memory manager */
    jpeg62_progress *progress; /* NULL: none */
    void *client_data;         /* the caller's own */
    int is_decompressor, global_state;
    void *src;                                            /* source manager */
    unsigned image_width, image_height;                   /* pixels, from the header */
    int num_components, jpeg_color_space;                 /* in the file */
    int out_color_space;                                  /* wanted */
    unsigned scale_num, scale_denom;                      /* wanted size as a fraction */
    double output_gamma;                                  /* ignored */
    int buffered_image, raw_data_out;                     /* modes */
    int dct_method, do_fancy_upsampling;                  /* wanted */
    int do_block_smoothing;                               /* for progressive files that are not complete */
    int quantize_colors, dither_mode, two_pass_quantize, desired_number_of_colors;
    int enable_1pass_quant, enable_external_quant, enable_2pass_quant;
    unsigned output_width, output_height;                 /* pixels, after jpeg_start_decompress; a crop changes the width */
    int out_color_components, output_components;          /* a pixel */
    int rec_outbuf_height;                                /* rows to ask for at a time */
    int actual_number_of_colors;
    uint8_t **colormap;
    unsigned output_scanline;                             /* next row */
    int input_scan_number;                                /* from 1 */
    unsigned input_iMCU_row;
    int output_scan_number;
    unsigned output_iMCU_row;
    int (*coef_bits)[64];                                 /* accuracy of each coefficient; NULL unless progressive */
    void *quant_tbl_ptrs[4], *dc_huff_tbl_ptrs[4], *ac_huff_tbl_ptrs[4];
    int data_precision;                                   /* bits a sample */
    void *comp_info;                                      /* components */
    int progressive_mode, arith_code;
    uint8_t arith_dc_L[16], arith_dc_U[16], arith_ac_K[16];
    unsigned restart_interval;                            /* MCUs; 0: none */
    int saw_JFIF_marker;
    uint8_t JFIF_major_version, JFIF_minor_version, density_unit;
    uint16_t X_density, Y_density;
    int saw_Adobe_marker;
    uint8_t Adobe_transform;
    int CCIR601_sampling;
    void *marker_list;
    int max_h_samp_factor, max_v_samp_factor;             /* of all components */
    int min_DCT_scaled_size;                              /* pixels that a block's side becomes: 8, or less if shrunk */
    unsigned total_iMCU_rows;
    uint8_t *sample_range_limit;
    int comps_in_scan;
    void *cur_comp_info[4];
    unsigned MCUs_per_row, MCU_rows_in_scan;
    int blocks_in_MCU, MCU_membership[10];
    int Ss, Se, Ah, Al;                                   /* of a progressive scan */
    int unread_marker;
    void *master, *main, *coef, *post, *inputctl, *marker, *entropy, *idct, *upsample, *cconvert, *cquantize;
};

typedef struct { /* its functions; a call that fails ends in error_exit */
    jpeg62_error *(*std_error)(jpeg62_error *err);
    void (*create)(jpeg62_decompress *cinfo, int version, size_t nbytes);
    void (*mem_src)(jpeg62_decompress *cinfo, const unsigned char *data, unsigned long nbytes);
    int (*read_header)(jpeg62_decompress *cinfo, int require_image);
    int (*start)(jpeg62_decompress *cinfo);
    void (*crop)(jpeg62_decompress *cinfo, unsigned *left, unsigned *width);
    unsigned (*skip)(jpeg62_decompress *cinfo, unsigned num_rows);
    unsigned (*read)(jpeg62_decompress *cinfo, uint8_t **rows, unsigned num_rows);
    int (*finish)(jpeg62_decompress *cinfo);
    void (*destroy)(jpeg62_decompress *cinfo);
} jpeg62_library;

#endif
