/* libjpeg-turbo's structures as its callers see them (ABI 62), so that the library can be bound at run time, without its headers.
 *
 * jpeg_CreateDecompress and jpeg_CreateCompress compare the version and the size of jpeg62_decompress and jpeg62_compress with
 * their own and refuse others: a library of ABI 7 or 8 is detected before it touches a field. Names are the library's, and no field
 * is omitted, because that would move all fields after it.
 *
 * Source: libjpeg-turbo, jpeglib.h and libjpeg.txt (https://libjpeg-turbo.org).
 */
#ifndef SHMLOAD_LIBJPEG62_H
#define SHMLOAD_LIBJPEG62_H

#include <stddef.h>
#include <stdint.h>

enum { JPEG62_VERSION = 62, JPEG62_RGB = 2, JPEG62_ISLOW = 0, JPEG62_IFAST = 1, JPEG62_HEADER_OK = 1, JPEG62_MESSAGE = 200 };

typedef struct jpeg62_common jpeg62_common;
typedef struct jpeg62_decompress jpeg62_decompress;
typedef struct jpeg62_compress jpeg62_compress;

typedef struct {
    void (*error_exit)(jpeg62_common *cinfo);                         /* may not return */
    void (*emit_message)(jpeg62_common *cinfo, int level);            /* level -1: a warning; 0 and more: a trace */
    void (*output_message)(jpeg62_common *cinfo);                     /* prints */
    void (*format_message)(jpeg62_common *cinfo, char *buffer);       /* into JPEG62_MESSAGE bytes */
    void (*reset_error_mgr)(jpeg62_common *cinfo);                    /* at the start of an image */
    int msg_code;                                                     /* number of the message */
    union {
        int i[8];
        char s[80];
    } msg_parm;                                                       /* its arguments */
    int trace_level;                                                  /* traces above this level are omitted */
    long num_warnings;                                                /* so far */
    const char *const *jpeg_message_table;                            /* texts, and a second table of the caller */
    int last_jpeg_message;
    const char *const *addon_message_table;
    int first_addon_message, last_addon_message;
} jpeg62_error;

typedef struct {
    void (*progress_monitor)(jpeg62_common *cinfo);     /* called at least once per row of MCUs of each scan */
    long pass_counter, pass_limit;                      /* work done and to do in this pass */
    int completed_passes, total_passes;                 /* passes */
} jpeg62_progress;

struct jpeg62_common { /* the common beginning of the two structures below */
    jpeg62_error *err;
    void *mem;
    jpeg62_progress *progress;
    void *client_data;
    int is_decompressor, global_state;
};

typedef struct { /* the beginning of jpeg_source_mgr: the rest of the file */
    const uint8_t *next_input_byte;
    size_t bytes_in_buffer;
} jpeg62_source;

typedef struct { /* provided by the caller */
    uint8_t *next_output_byte;                            /* where to write */
    size_t free_in_buffer;                                /* bytes left there */
    void (*init_destination)(jpeg62_compress *cinfo);
    int (*empty_output_buffer)(jpeg62_compress *cinfo);   /* called when the buffer is full; sets the two fields above */
    void (*term_destination)(jpeg62_compress *cinfo);
} jpeg62_destination;

struct jpeg62_decompress {
    jpeg62_error *err;         /* set by the caller before anything else */
    void *mem;                 /* memory manager */
    jpeg62_progress *progress; /* NULL: none */
    void *client_data;         /* the caller's data */
    int is_decompressor, global_state;
    jpeg62_source *src;                                   /* source manager */
    unsigned image_width, image_height;                   /* pixels, from the header */
    int num_components, jpeg_color_space;                 /* in the file */
    int out_color_space;                                  /* requested */
    unsigned scale_num, scale_denom;                      /* requested size as a fraction */
    double output_gamma;                                  /* ignored */
    int buffered_image, raw_data_out;                     /* modes */
    int dct_method, do_fancy_upsampling;                  /* requested */
    int do_block_smoothing;                               /* for incomplete progressive files */
    int quantize_colors, dither_mode, two_pass_quantize, desired_number_of_colors;
    int enable_1pass_quant, enable_external_quant, enable_2pass_quant;
    unsigned output_width, output_height;                 /* pixels, after jpeg_start_decompress; a crop changes the width */
    int out_color_components, output_components;          /* per pixel */
    int rec_outbuf_height;                                /* rows to request at a time */
    int actual_number_of_colors;
    uint8_t **colormap;
    unsigned output_scanline;                             /* next row */
    int input_scan_number;                                /* from 1 */
    unsigned input_iMCU_row;
    int output_scan_number;
    unsigned output_iMCU_row;
    int (*coef_bits)[64];                                 /* accuracy of each coefficient; NULL unless progressive */
    void *quant_tbl_ptrs[4], *dc_huff_tbl_ptrs[4], *ac_huff_tbl_ptrs[4];
    int data_precision;                                   /* bits per sample */
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
    int min_DCT_scaled_size;                              /* size in pixels of a block's side: 8, or less if reduced */
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

struct jpeg62_compress {
    jpeg62_error *err;         /* as above */
    void *mem;
    jpeg62_progress *progress;
    void *client_data;
    int is_decompressor, global_state;
    jpeg62_destination *dest;
    unsigned image_width, image_height;                   /* pixels */
    int input_components, in_color_space;
    double input_gamma;
    int data_precision;
    int num_components, jpeg_color_space;                 /* in the file */
    void *comp_info;
    void *quant_tbl_ptrs[4], *dc_huff_tbl_ptrs[4], *ac_huff_tbl_ptrs[4];
    uint8_t arith_dc_L[16], arith_dc_U[16], arith_ac_K[16];
    int num_scans;
    const void *scan_info;                                /* NULL: one sequential scan */
    int raw_data_in, arith_code;
    int optimize_coding;                                  /* Huffman tables optimized for the image */
    int CCIR601_sampling, smoothing_factor, dct_method;
    unsigned restart_interval;                            /* MCUs; 0: none */
    int restart_in_rows;                                  /* or in rows of MCUs */
    int write_JFIF_header;
    uint8_t JFIF_major_version, JFIF_minor_version, density_unit;
    uint16_t X_density, Y_density;
    int write_Adobe_marker;
    unsigned next_scanline;
    int progressive_mode, max_h_samp_factor, max_v_samp_factor;
    unsigned total_iMCU_rows;
    int comps_in_scan;
    void *cur_comp_info[4];
    unsigned MCUs_per_row, MCU_rows_in_scan;
    int blocks_in_MCU, MCU_membership[10];
    int Ss, Se, Ah, Al;
    void *master, *main, *prep, *coef, *marker, *cconvert, *downsample, *fdct, *entropy, *script_space;
    int script_space_size;
};

typedef struct { /* the library's functions; a call that fails ends in error_exit */
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
    void **(*read_coefficients)(jpeg62_decompress *cinfo);
    void (*copy_parameters)(const jpeg62_decompress *from, jpeg62_compress *to);
    void (*create_compress)(jpeg62_compress *cinfo, int version, size_t nbytes);
    void (*write_coefficients)(jpeg62_compress *cinfo, void **coefficients);
    void (*finish_compress)(jpeg62_compress *cinfo);
    void (*destroy_compress)(jpeg62_compress *cinfo);
} jpeg62_library;

#endif
